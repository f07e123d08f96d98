"""A whole executor process around the toy: `python -m tests.fakes.toy_executor_main --listen 127.0.0.1:0 ...`.

Integration tests start it, kill it and start it again on the same address.
"""

import argparse
import logging
import secrets
import sys
import time
from pathlib import Path

import uvloop

from common.messages import StepPlan
from executor_svc.app import ServeOptions, serve
from executor_svc.session import SessionLimits
from executor_svc.tracing import build_sink
from tests.fakes.toy_executor import ToyExecutor, toy_info


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--address-file", type=Path, help="gets the bound address")
    parser.add_argument("--metrics-listen", default="")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="before each result")
    parser.add_argument("--load-ms", type=float, default=0.0, help="before the executor is ready")
    parser.add_argument("--lease-ms", type=float, default=5000.0)
    parser.add_argument("--drain-s", type=float, default=5.0)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--model-hash", default="toy-0")
    parser.add_argument("--eos-chance", type=float, default=0.0)
    parser.add_argument("--fail-step", type=int, action="append", default=[], help="this step's wait: DEVICE_FAILED")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s toy %(levelname)s %(message)s")

    def delay(plan: StepPlan) -> None:
        time.sleep(args.delay_ms / 1000)

    def build() -> ToyExecutor:
        time.sleep(args.load_ms / 1000)
        toy = ToyExecutor(
            toy_info(
                num_blocks=args.num_blocks,
                block_size=args.block_size,
                max_num_seqs=args.max_num_seqs,
                num_rows=args.max_num_seqs + 64,
                model_hash=args.model_hash,
            ),
            eos_chance=args.eos_chance,
            incarnation=secrets.randbits(63) | 1,
            on_wait=delay if args.delay_ms else None,
        )
        toy.fail_steps.update(args.fail_step)
        return toy

    limits = SessionLimits(lease_ns=int(args.lease_ms * 1e6))
    options = ServeOptions(
        args.listen,
        drain_s=args.drain_s,
        address_file=args.address_file,
        limits=limits,
        metrics_listen=args.metrics_listen,
    )
    sink = build_sink()
    try:
        status = uvloop.run(serve(options, build, sink))
    finally:
        if sink is not None:
            sink.shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
