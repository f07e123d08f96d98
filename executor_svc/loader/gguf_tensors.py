"""That a GGUF file's tensors are those of its decoder: asked of the headers, before memory is taken for any."""

from common.errors import ModelError
from common.model_files.gguf_header import GgufTensor
from common.model_files.gguf_model import GgufModel
from executor_svc.loader.names import ROPE_DIVISORS, Part, parts
from executor_svc.models.config import ModelConfig


def check_tensors(model: GgufModel, config: ModelConfig) -> None:
    """Raises ModelError for a tensor that is missing, of another shape, or that this decoder would leave out of its
    computation, which would then be another one than the file means."""
    known = {ROPE_DIVISORS, *(find_tensor(model, part).name for part in parts(config))}
    for name, tensor in model.tensors.items():
        if name not in known:
            raise ModelError(
                f"{tensor.path}: tensor {name} belongs to no {config.architecture} model of {config.num_layers} "
                "layers as this decoder computes it"
            )


def find_tensor(model: GgufModel, part: Part) -> GgufTensor:
    """Raises ModelError naming file and tensor when it is missing or has another shape."""
    info = model.tensors.get(part.gguf_name)
    if info is None:
        raise ModelError(f"{model.path}: tensor {part.gguf_name} is missing")
    check_shape(str(info.path), part.gguf_name, info.shape, part.shape)
    return info


def check_shape(source: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises ModelError naming `source` and the tensor."""
    if found != wanted:
        raise ModelError(f"{source}: tensor {name} has shape {list(found)}, the configuration asks for {list(wanted)}")
