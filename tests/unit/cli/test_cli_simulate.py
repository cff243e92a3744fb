"""`semel simulate`: what it tells of a seed that failed."""

from click.testing import CliRunner

from semel.cli.root import root


def test_a_failed_seed_is_told_with_all_that_plays_it_again() -> None:
    arguments = ["--steps", "300", "--fault", "skip-marker"]
    result = CliRunner().invoke(root, ["simulate", "--seed", "4", "--processes", "1", *arguments])
    assert result.exit_code == 1
    (hint,) = [line for line in result.stdout.splitlines() if "play it again" in line]
    assert hint.endswith("semel simulate --seed 4 --steps 300 --fault skip-marker")
    again = CliRunner().invoke(root, hint.split("semel ")[1].split())
    assert [line for line in again.stdout.splitlines() if line.startswith("seed 4 broke")] == [
        line for line in result.stdout.splitlines() if line.startswith("seed 4 broke")
    ]
