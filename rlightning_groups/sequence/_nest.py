"""Walking over a batch: any nest of dicts, lists, tuples, named tuples and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from rlightning_groups.errors import ShapeError

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclasses.dataclass(frozen=True)
class Path:
    """Where a tensor lies in its nest.

    Attributes:
        parts: keys, field names and indices from the outermost in.
        named: whether the innermost is a key or a field name; an index is no name.
    """

    parts: tuple[str, ...] = ()
    named: bool = True

    def __str__(self) -> str:
        return ".".join(self.parts)

    def below(self, part: object, named: bool) -> Path:
        """The path of an element."""
        return Path((*self.parts, str(part)), named)

    def say(self) -> str:
        """The path in words."""
        return f"the tensor {str(self)!r}" if self.parts else "the tensor"


def map_tensors(nest: Any, function: Callable[[Path, Tensor], Any], leave: Collection[str], call: str) -> Any:
    """The same nest with other tensors.

    Args:
        nest: a tensor or a nest of tensors; numbers, strings and ``None`` stay as they are.
        function: gives the new tensor.
        leave: paths of elements that stay as they are, with everything below them.
        call: who asks, for messages.

    Raises:
        ShapeError: a path of ``leave`` leads nowhere, or the nest holds an object of another kind.
    """
    if isinstance(leave, str):
        raise ShapeError(f"{call}: leave={leave!r} must be a list of paths, such as [{leave!r}]")
    unused = set(leave)

    def walk(element: Any, path: Path) -> Any:
        name = str(path)
        if path.parts and name in leave:
            unused.discard(name)
            return element
        if isinstance(element, Tensor):
            return function(path, element)
        if element is None or isinstance(element, _PLAIN):
            return element
        if isinstance(element, Mapping):
            items = {key: walk(value, path.below(key, True)) for key, value in element.items()}
            if not isinstance(element, MutableMapping):
                return items
            result = copy.copy(element)
            for key, value in items.items():
                result[key] = value
            return result
        if isinstance(element, tuple) and hasattr(element, "_fields"):
            fields = zip(element._fields, element, strict=True)
            return type(element)(*[walk(value, path.below(field, True)) for field, value in fields])
        if isinstance(element, (list, tuple)):
            return type(element)([walk(value, path.below(i, False)) for i, value in enumerate(element)])
        if dataclasses.is_dataclass(element) and not isinstance(element, type):
            record: Any = copy.copy(element)
            for field in dataclasses.fields(element):
                value = walk(getattr(element, field.name), path.below(field.name, True))
                object.__setattr__(record, field.name, value)  # also where it is frozen
            return record
        raise ShapeError(
            f"{call}: {name or 'the batch'!r} is a {type(element).__name__}, neither a tensor nor a dict, "
            f"list, tuple or dataclass of them; make it a tensor, or name it in leave=[{name!r}]"
        )

    result = walk(nest, Path())
    if unused:
        raise ShapeError(
            f"{call}: leave names {sorted(unused)}, but the batch has no such element; an element is named "
            f"by the keys, field names and indices that lead to it, joined by dots"
        )
    return result


def length_along(path: Path, x: Tensor, dim: int, expected: tuple[str, int] | None, call: str) -> int:
    """A tensor's length along the sequence dim, checked.

    Args:
        path: where the tensor lies.
        x: the tensor.
        dim: its sequence dim.
        expected: who else has which length.
        call: who asks, for messages.

    Raises:
        ShapeError: it has no such dim, no tokens, or another length.
    """
    hint = f"; if it is no sequence, name it in leave=[{str(path)!r}]" if path.parts else ""
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{call}: {path.say()} of shape {list(x.shape)} has no dim {dim}{hint}")
    length = x.shape[dim]
    if length == 0:
        raise ShapeError(f"{call}: {path.say()} of shape {list(x.shape)} has no tokens along dim {dim}{hint}")
    if expected is not None and length != expected[1]:
        raise ShapeError(
            f"{call}: {path.say()} of shape {list(x.shape)} has {length} tokens along dim {dim}, but "
            f"{expected[0]} has {expected[1]}{hint}"
        )
    return length
