"""The environment variables that a launcher sets for each rank, or may set differently. Pure.

Ranks that share a template differ in these, and in nothing else that a dataset may depend on. Each worker gets those of
its own rank.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

__all__ = ["is_of_rank", "rank_variables", "set_rank_variables"]

_FAMILIES = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "MV2_COMM_WORLD_", "HYDI_", "HYDRA_", "PALS_", "JSM_")
"""The launchers' own variables. Which of them differ by rank depends on the launcher's version."""

_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_ERROR_FILE",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_TASK_PID",
        "SLURM_CPU_BIND",
        "SLURM_CPU_BIND_LIST",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "GPU_DEVICE_ORDINAL",
    }
)


def is_of_rank(name: str) -> bool:
    """Return whether an environment variable may differ from rank to rank."""
    return name in _NAMES or (name.startswith(_FAMILIES) and not name.endswith("_SIZE"))


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may differ from rank to rank."""
    return {name: value for name, value in environ.items() if is_of_rank(name)}


def set_rank_variables(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Replace the variables of one rank by those of another one."""
    for name in [name for name in environ if is_of_rank(name) and name not in variables]:
        del environ[name]
    environ.update(variables)
