import pytest
from hypothesis import given, strategies as st

from zoo.errors import PlanError
from zoo.planner.plan import Item, Plan


@st.composite
def plans(draw: st.DrawFn, most: int = 12) -> Plan:
    """Draws plans of any nesting."""
    steps = draw(st.integers(1, most))

    def cut(start: int, stop: int, depth: int) -> list[Item]:
        items: list[Item] = []
        while start < stop:
            end = draw(st.integers(start + 1, stop))
            if depth and draw(st.booleans()):
                items.append(tuple(cut(start, end, depth - 1)))
            else:
                items += range(start, end)
            start = end
        return items

    return Plan(cut(0, steps, 3))


@given(plans())
def test_text_and_json_read_back(plan: Plan) -> None:
    assert Plan.parse(plan.text()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert isinstance(Plan.from_json(plan.to_json()), Plan)


@given(plans())
def test_a_plan_lists_each_step_once(plan: Plan) -> None:
    assert plan.flatten() == tuple(range(len(plan.flatten())))
    plan.check(len(plan.flatten()))


def test_runs_counts_the_last_inner_segment_once_less() -> None:
    assert Plan((0, 1)).runs() == (1, 1)
    assert Plan(((0, 1), 2)).runs() == (2, 2, 1)
    assert Plan((((0, 1), 2), 3)).runs() == (3, 3, 2, 1)
    assert Plan(((0, (1, 2)), 3)).runs() == (2, 2, 2, 1)


def test_text_says_what_is_kept_and_what_is_recomputed() -> None:
    plan = Plan(((0, 1), (2, (3, 4)), 5))
    assert plan.text() == "(0-1) (2 (3-4)) 5"
    assert str(plan).startswith("6 steps: 1 kept, 5 recomputed in 2 segments, nested 2 deep")


def test_drawing_has_a_line_per_step_with_its_name() -> None:
    lines = Plan(((0, (1,)), 2)).draw(["conv", "norm", "head"]).splitlines()
    assert [line.split() for line in lines] == [
        ["┌", "recompute", "0", "conv"],
        ["└─", "recompute", "1", "norm"],
        ["keep", "2", "head"],
    ]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((1, 0), "position 0 holds step 1"),
        ((0, 0), "position 1 holds step 0"),
        ((0, ()), "empty segment"),
        ((0, "1"), "not '1'"),
        ((True,), "not True"),
    ],
)
def test_malformed_plans_are_refused(items: tuple[object, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(items)


@pytest.mark.parametrize("items", [5, "01", None, {0: 1}])
def test_what_is_no_sequence_is_refused(items: object) -> None:
    with pytest.raises(PlanError, match="a plan is a sequence"):
        Plan(items)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no plan in JSON"):
        Plan.from_json("(0 1)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(0-1", "open"),
        ("0)", "did not open"),
        ("0,1", "holds ','"),
        ("2-1", "runs backwards"),
        ("(0-99999999999)", "beyond 1000000"),
    ],
)
def test_malformed_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 900 + "0" + ")" * 900, "nest more than 500 deep"),
        ("(" * 501 + "0" + ")" * 501, "nest more than 500 deep; use fewer, longer segments"),
        ("9" * 5000, "names a step beyond 1000000"),
        ("0-" + "9" * 5000, "names a step beyond 1000000"),
        ("0-1000000 " * 10**4, "position 1000001 holds step 0"),
        (None, "Plan.parse takes text; got NoneType"),
    ],
    ids=["nested", "a little", "digits", "range", "ranges", "none"],
)
def test_no_text_fills_memory_or_the_stack(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Plan.parse(text)
    assert len(str(caught.value)) < 500


def test_leading_zeros_are_no_large_number() -> None:
    assert Plan.parse("0" * 5000 + " 01-002") == Plan((0, 1, 2))


def test_a_list_that_holds_itself_is_refused() -> None:
    items: list[object] = [0]
    items.append(items)
    twice: list[object] = []
    twice += [twice, twice]
    shared: object = [0]
    for _ in range(64):
        shared = [shared, shared]
    for wrong, message in ((items, "position 1 holds step 0"), (twice, "nest more than 500 deep"),
                           ([shared], "position 1 holds step 0")):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            Plan(wrong)  # type: ignore[arg-type]


def test_a_plan_for_another_length_is_refused() -> None:
    with pytest.raises(PlanError, match="covers 2 steps but the model has 3"):
        Plan((0, 1)).check(3)
