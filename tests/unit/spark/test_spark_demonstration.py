"""The demonstration's verdict, without a Spark: whatever goes wrong is seen, told and in the exit code."""

import contextlib
import io
import itertools
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).parents[3] / "examples" / "demonstration"))
import run
from caught_up import finished_offsets
from feed import Fed
from verdict import Row, Verdict, compare

RunInto = Callable[..., Awaitable[tuple[Verdict, run.Demonstration]]]

COMMITTED = {"order-0": 100, "order-1": 200, "order-2": 300}
RIGHT = list(COMMITTED.items())
# What comes out, and what is said of it: lost, duplicated, uncommitted, wrong.
BROKEN: dict[str, tuple[list[Row], tuple[int, int, int, int]]] = {
    "one is lost": (RIGHT[1:], (1, 0, 0, 0)),
    "nothing came": ([], (3, 0, 0, 0)),
    "one came twice": ([*RIGHT, RIGHT[0]], (0, 1, 0, 0)),
    "one came three times": ([*RIGHT, RIGHT[0], RIGHT[0]], (0, 2, 0, 0)),
    "one was aborted": ([*RIGHT, ("order-3", 400)], (0, 0, 1, 0)),
    "one has a wrong price": ([("order-0", 101), *RIGHT[1:]], (0, 0, 0, 1)),
    "one is lost, and another came twice": ([*RIGHT[1:], RIGHT[1]], (1, 1, 0, 0)),
}


def test_each_once_with_its_price_is_exactly_once_in_any_order() -> None:
    verdict = compare(COMMITTED, RIGHT[::-1])
    assert verdict == Verdict(out=3, lost=0, duplicated=0, uncommitted=0, wrong=0)
    assert verdict.is_exactly_once


@pytest.mark.parametrize(("rows", "counts"), BROKEN.values(), ids=BROKEN.keys())
def test_whatever_is_broken_is_counted(rows: list[Row], counts: tuple[int, int, int, int]) -> None:
    verdict = compare(COMMITTED, rows)
    assert (verdict.lost, verdict.duplicated, verdict.uncommitted, verdict.wrong) == counts
    assert verdict.out == len(rows)
    assert not verdict.is_exactly_once


def demonstrate(rows: list[Row], shortfall: str | None = None) -> int:
    """The exit code of a demonstration that such rows came out of."""

    @contextlib.asynccontextmanager
    async def stage(*given: object) -> AsyncIterator[Any]:
        async def judged(progress: object, seed: int) -> Verdict:
            return compare(COMMITTED, rows)

        fed = Fed(dict(COMMITTED), sent=5, aborted=2)
        yield SimpleNamespace(run=judged, fed=fed, killed=["broker 7"], shortfall=shortfall)

    return run.main([], stage)


def test_a_demonstration_that_was_exactly_once_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert demonstrate(RIGHT) == 0
    assert "NOT" not in capsys.readouterr().out


@pytest.mark.parametrize(("rows", "counts"), BROKEN.values(), ids=BROKEN.keys())
def test_any_other_exits_with_1_and_says_so(
    rows: list[Row], counts: tuple[int, int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demonstrate(rows) == 1
    shown = capsys.readouterr().out
    assert "NOT exactly once" in shown
    numbers = {cells[0]: cells[1] for line in shown.splitlines() if len(cells := cells_of(line)) == 2}
    names = ("lost", "duplicated", "out, though not committed", "out, with a wrong price")
    assert tuple(int(numbers[name]) for name in names) == counts


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("|", "\u2502").split("\u2502")[1:-1]]


@pytest.mark.parametrize("rows", [RIGHT, RIGHT[1:]], ids=["right", "wrong"])
def test_one_that_fell_short_exits_with_1_whatever_came_out(
    rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demonstrate(rows, shortfall="time was up") == 1
    assert "NOT" in capsys.readouterr().out


class Output:
    """What is to come out is there, and nothing else comes."""

    def __init__(self) -> None:
        self.come = list(RIGHT)

    async def count(self) -> int:
        return len(self.come)

    async def rows(self) -> list[Row]:
        return self.come

    async def is_amid_epoch(self) -> bool:
        return True

    async def has_caught_up(self, *given: object) -> bool:
        return True


class LateOutput(Output):
    """All there is to count has come out, and a batch is under way that puts out one order again."""

    async def has_caught_up(self, *given: object) -> bool:
        is_over = len(self.come) > len(RIGHT)
        self.come = [*RIGHT, RIGHT[0]]
        return is_over


class SlowOutput(Output):
    """Nothing comes out while anyone looks, and so nobody is killed; all of it is there in the end."""

    async def count(self) -> int:
        return 0


class StuckOutput(Output):
    """All is there, and the pipeline has more to do still when time is up."""

    async def has_caught_up(self, *given: object) -> bool:
        return False


class IdleOutput(Output):
    """The pipeline is never seen in the middle of an epoch."""

    async def is_amid_epoch(self) -> bool:
        return False


@pytest.fixture
def run_into(monkeypatch: pytest.MonkeyPatch) -> RunInto:
    """Runs a demonstration with this output, in which every look at the clock takes a second."""

    async def feed(bootstrap: str, topic: str, fed: Fed, **given: object) -> None:
        fed.committed.update(COMMITTED)

    async def run_into(output: Any, console: Console | None = None) -> tuple[Verdict, run.Demonstration]:
        monkeypatch.setattr(run, "feed", feed)
        monkeypatch.setattr(run, "has_caught_up", output.has_caught_up)
        monkeypatch.setattr(run, "LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=itertools.count().__next__))
        cluster: Any = None
        child: Any = Child()
        console = console or Console(file=io.StringIO())
        demonstration = run.Demonstration(3, child, cluster, child, output, console)
        return await demonstration.run(Progress(disable=True), seed=1), demonstration

    return run_into


class Child:
    """A broker, or a driver, that is killed and started without being there."""

    bootstrap, checkpoint, pid, is_alive = "localhost:1", Path(), 1, True

    def start(self, bootstrap: str = "") -> float:
        return 0.0

    def kill(self) -> None:
        pass

    def log_end(self) -> str:
        return "the log"


async def test_one_in_which_all_was_killed_and_all_came_out_did_not_fall_short(run_into: RunInto) -> None:
    verdict, demonstration = await run_into(Output())
    assert verdict.is_exactly_once
    assert (len(demonstration.killed), demonstration.shortfall) == (3, None)


async def test_what_comes_out_twice_after_all_has_come_out_is_seen(run_into: RunInto) -> None:
    verdict, _ = await run_into(LateOutput())
    assert verdict == Verdict(out=4, lost=0, duplicated=1, uncommitted=0, wrong=0)


@pytest.mark.parametrize(
    ("output", "killed", "shortfall"),
    [
        (SlowOutput(), 0, "time was up with 3 more to kill"),
        (StuckOutput(), 3, "the pipeline has not caught up in time"),
        (IdleOutput(), 3, "no Spark driver was killed in the middle of an epoch"),
    ],
    ids=["not killed", "not caught up", "not caught"],
)
async def test_what_was_not_shown_is_a_shortfall(
    run_into: RunInto, output: Output, killed: int, shortfall: str
) -> None:
    verdict, demonstration = await run_into(output)
    assert verdict.is_exactly_once, "by its rows alone it would pass"
    assert (len(demonstration.killed), demonstration.shortfall) == (killed, shortfall)


def test_a_batch_that_is_planned_and_not_finished_is_not_caught_up_with(tmp_path: Path) -> None:
    assert finished_offsets(tmp_path, "orders") == {}
    for log, batches in (("offsets", (9, 10)), ("commits", (9,))):
        (tmp_path / log).mkdir()
        for batch in batches:
            (tmp_path / log / str(batch)).write_text(f'v1\n{{}}\n{{"orders":{{"0":{batch},"1":7}}}}')
    (tmp_path / "commits" / ".10.tmp").touch()
    assert finished_offsets(tmp_path, "orders") == {}
    (tmp_path / "commits" / "10").touch()
    assert finished_offsets(tmp_path, "orders") == {0: 10, 1: 7}
    assert finished_offsets(tmp_path, "others") == {}


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("output", [StuckOutput(), IdleOutput()], ids=["it runs", "an epoch is waited for"])
async def test_how_far_it_is_is_told_in_lines_where_bars_cannot_move(
    run_into: RunInto, output: Output, is_terminal: bool
) -> None:
    shown = io.StringIO()
    await run_into(output, Console(file=shown, force_terminal=is_terminal, width=200))
    lines = [line.strip() for line in shown.getvalue().splitlines() if "orders in" in line]
    assert (len(lines) > 3) != is_terminal
    assert all(re.fullmatch(r"[0-9]+\.0 s  orders in 0 of 3, out 3", line) for line in lines), lines
    seconds = [float(line.split()[0]) for line in lines]
    assert all(later - earlier >= run.LINE_EVERY_S for earlier, later in itertools.pairwise(seconds))


@pytest.mark.parametrize("orders", ["0", "-5", "99", "many"])
def test_too_few_orders_are_refused(orders: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main([f"--orders={orders}"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: script/run ")
    assert f"'{orders}' is not a number of at least 100" in said


def test_help_shows_what_is_so_unless_one_says_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(["--help"])
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for default in ("(default: kafka)", "(default: 60000)", "(default: end it)", "(default: the time)"):
        assert default in said
