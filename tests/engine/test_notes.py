"""Notes of values: a change is seen, what was is given again, and big things are not copied."""

import collections
import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tests.engine.pitfalls.program import compare, frozen
from zoo.engine.notes import note, thaw, unchanged
from zoo.errors import RecomputeError
from zoo.measure.memory import trace

Make = Callable[[], Any]
Pair = collections.namedtuple("Pair", "first second")
Change = Callable[[Any], object]
CASES: dict[str, tuple[Make, Change]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "shorter list": (lambda: [1, 2], lambda v: v.pop()),
    "entry": (lambda: [1, 2], lambda v: v.__setitem__(0, 5)),
    "list of lists": (lambda: [[1], [2]], lambda v: v[1].append(3)),
    "shorter list of lists": (lambda: [[1], [2]], lambda v: v.pop()),
    "longer list of lists": (lambda: [[1], [2]], lambda v: v.append([3])),
    "tuple of lists": (lambda: ([1], [2]), lambda v: v[1].append(3)),
    "list of tensors": (lambda: [torch.ones(2)], lambda v: v[0].add_(1)),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "dict": (lambda: {"a": 1}, lambda v: v.update(b=2)),
    "smaller dict": (lambda: {"a": 1, "b": 2}, lambda v: v.pop("a")),
    "value": (lambda: {"a": 1}, lambda v: v.update(a=2)),
    "dict of lists": (lambda: {"a": [1]}, lambda v: v["a"].append(2)),
    "default dict": (lambda: collections.defaultdict(list), lambda v: v["a"].append(1)),
    "counter": (collections.Counter, lambda v: v.update("ab")),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "long list": (lambda: [0] * 100, lambda v: v.append(1)),
    "long dict": (lambda: dict.fromkeys(range(100)), lambda v: v.update(a=1)),
    "long deque": (lambda: collections.deque([0] * 100), lambda v: v.append(1)),
    "full deque": (lambda: collections.deque([0] * 100, maxlen=100), lambda v: v.append(1)),
    "long dict of counts": (lambda: dict.fromkeys(range(100), 0), lambda v: v.update({3: 1})),
    "long counter": (lambda: collections.Counter(range(100)), lambda v: v.update([3])),
    "longer counter": (lambda: collections.Counter(range(5000)), lambda v: v.update("a")),
    "long set": (lambda: set(range(100)), lambda v: v.add(len(v))),
    "order of a dict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda v: v.move_to_end(next(iter(v))),
    ),
    "list in a named tuple": (lambda: Pair([1], 2), lambda v: v.first.append(3)),
    "tensor": (lambda: torch.ones(3), lambda v: v.mul_(2)),
    "array": (lambda: numpy.ones(3), lambda v: v.__imul__(2)),
}


@pytest.mark.parametrize(("make", "change"), CASES.values(), ids=CASES)
def test_a_change_is_seen_and_what_was_is_given_again(make: Make, change: Change) -> None:
    """Again and again: a second run does to its copy what the first did to the value."""
    value = make()
    before, noted = frozen(copy.deepcopy(value)), note(value)
    assert unchanged(noted, value)
    change(value)
    assert not unchanged(noted, value)
    for _ in range(2):
        again = thaw(noted, {})
        assert type(again) is type(value)
        compare(frozen(again), before)
        change(again)
        compare(frozen(again), frozen(value))


@pytest.mark.parametrize(
    "make", [lambda: [1], lambda: {"a": 1}, lambda: {1}, lambda: numpy.ones(2)]
)
def test_an_equal_value_is_another(make: Make) -> None:
    """What others append to the one is not in the other."""
    assert not unchanged(note(make()), make())


def test_another_tensor_of_the_same_version_is_another() -> None:
    assert not unchanged(note(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: (v, 2), lambda v: [v], lambda v: {"a": v}])
def test_an_equal_number_of_another_type_is_another(wrap: Change) -> None:
    """Divided or indexed by, they are not the same."""
    value: Any = wrap(1)
    noted = note(value)
    assert unchanged(noted, value)
    for other in (1.0, True):
        if isinstance(value, list | dict):
            value[0 if isinstance(value, list) else "a"] = other
        assert not unchanged(noted, value if isinstance(value, list | dict) else wrap(other))


def test_a_container_in_itself_is_noted_and_given_again_as_a_whole() -> None:
    """A tree whose nodes know their parents."""
    tree: dict[str, Any] = {"count": 0, "leaves": []}
    tree["leaves"].append({"parent": tree, "count": 0})
    noted = note(tree)
    assert unchanged(noted, tree)
    tree["leaves"][0]["count"] += 1
    assert not unchanged(noted, tree)
    again = thaw(noted, {})
    assert again["leaves"][0]["count"] == 0
    assert again["leaves"][0]["parent"] is again is not tree


def test_who_shares_a_list_shares_its_copy() -> None:
    value, fresh = [1, 2], {}
    noted = note(value), note({"it": value})
    value.append(3)
    assert thaw(noted[0], fresh) is thaw(noted[1], fresh)["it"]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_a_tensor_is_given_again_without_its_history(moved: bool, flag: bool) -> None:
    value = (torch.ones(3).requires_grad_(flag) * 2) if flag else torch.ones(3)
    noted, expected = note(value), value.detach().clone()
    if moved:
        value.detach().add_(1)
    again = thaw(noted, {})
    assert (again.requires_grad, again.grad_fn) == (flag, None)
    assert torch.equal(again, expected)


def test_a_flag_of_a_tensor_is_part_of_it() -> None:
    value = torch.ones(3)
    noted = note(value)
    assert not unchanged(noted, value.requires_grad_())
    assert not unchanged(note(value), torch.ones(3).requires_grad_())


def test_a_big_tensor_that_was_changed_is_refused() -> None:
    value = torch.ones(100_000)
    noted = note(value)
    value.add_(1)
    with pytest.raises(RecomputeError, match=r"a tensor \(100000,\) kept as an attribute or var"):
        thaw(noted, {})


def test_big_values_are_neither_copied_nor_gone_through() -> None:
    values = torch.ones(100_000), numpy.ones(100_000), [[0]] * 1000, dict.fromkeys(range(5000))
    kept: list[Any] = []
    assert trace(lambda: kept.extend(map(note, values))).kept == 0
    assert [noted.parts for noted in kept[1:]] == [None, 1000, 5000]
