"""What torch says about GPUs on machines that have none, or an old driver, is kept from people who asked for no GPU.

``torch.cuda`` warns when it is merely asked whether there is a device ("CUDA initialization: The NVIDIA driver on your system
is too old", "Can't initialize NVML"). ``twostroke doctor`` asks the same question and answers with what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping

MODULE = "torch.cuda"
RULE = f"ignore:::{MODULE}"


def hush(environment: MutableMapping[str, str]) -> None:
    """Ignore the warnings of ``torch.cuda`` in this process, and in its children through ``PYTHONWARNINGS``. Rules that the
    user has given come later and win."""
    warnings.filterwarnings("ignore", module=MODULE.replace(".", r"\.") + "$", append=True)
    theirs = environment.get("PYTHONWARNINGS", "")
    if RULE not in theirs.split(","):
        environment["PYTHONWARNINGS"] = ",".join(filter(None, (RULE, theirs)))
