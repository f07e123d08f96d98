"""Small simulations for tests."""

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.simulate.lengths import Lengths
from scheduler_svc.simulate.results import Results, conditions_of, results_of
from scheduler_svc.simulate.simulation import Setup, Simulation
from scheduler_svc.simulate.step_model import Cost, Shape, StepModel
from scheduler_svc.simulate.trace import Trace
from scheduler_svc.simulate.workload import DrawnWorkload

SHAPE = Shape(block_size=16, num_blocks=400, max_num_seqs=16, max_tokens_per_step=256, max_context=512, vocab_size=1000)
MODEL = StepModel(
    name="test",
    origin="derived",
    costs=(Cost(base_us=1000.0, decode_row_us=10.0, prefill_token_us=5.0, context_token_us=0.01),),
    executor=SHAPE,
    conditions={},
)
IDEAL = Setup(network_us=0.0, loop_us=0.0)


def drawn(**changes: object) -> Trace:
    values: dict[str, object] = {
        "requests": 60,
        "rate": 40.0,
        "prompt": Lengths("uniform", 1, 200),
        "output": Lengths("uniform", 1, 60),
        **changes,
    }
    return DrawnWorkload(**values).trace()  # type: ignore[arg-type]


def simulated(
    trace: Trace, config: CoreConfig | None = None, setup: Setup | None = None, model: StepModel = MODEL
) -> tuple[Simulation, Results]:
    config, setup = config or CoreConfig(), setup or Setup()
    simulation = Simulation(config, trace, model, setup)
    simulation.run()
    return simulation, results_of(simulation, conditions_of(config, model, setup, trace.description))
