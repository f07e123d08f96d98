"""Before any test module is imported: what exact numerics need in the environment must stand there before torch does."""

from executor_svc.environment import prepare_environment

prepare_environment("exact")
