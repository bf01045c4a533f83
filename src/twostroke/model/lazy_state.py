"""A mapping of canonical tensors that reads a tensor, and joins it from its parts, on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


class LazyState(Mapping[str, Tensor]):
    """Canonical tensors by name. Each is read on access and not kept, so that a model larger than the memory can be converted
    tensor by tensor."""

    def __init__(self, readers: dict[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
