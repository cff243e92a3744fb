"""Commands in this process: output, messages and exit codes."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from fake_broker import FakeBroker

from semel.cli.consume import parse_start
from semel.cli.root import SUBCOMMANDS, root
from semel.client.consumer import BEGINNING, END, Start
from semel.compilation import is_compiled
from semel.version import __version__
from semel.wire.batch import read_header
from semel.wire.records import Record, build_batch

# Their output is a broker's log, records as --format says, and a script.
# They run until they are stopped, or print text that is for programs.
WITHOUT_OUTPUT = [("serve",), ("consume",), ("completion",), ("run",), ("stages", "run"), ("gateway",)]


def run(broker: FakeBroker | None, *arguments: str) -> Result:
    environment = {} if broker is None else {"SEMEL_BOOTSTRAP": broker.bootstrap}
    return CliRunner().invoke(root, arguments, env=environment)


def fill(broker: FakeBroker, topic: str, partition: int, *records: Record) -> None:
    batch = build_batch(records)
    broker.topics[topic][partition].store(batch, read_header(batch))


def all_commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    context = click.Context(root)
    for name in SUBCOMMANDS:
        found.append((name,))
        command = root.get_command(context, name)
        if isinstance(command, click.Group):
            found += [(name, below) for below in command.commands]
    return found


def find_command(path: tuple[str, ...]) -> click.Command:
    context = click.Context(root)
    command: click.Command | None = root
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(context, name)
    assert command is not None
    return command


@pytest.mark.parametrize("path", all_commands(), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    result = run(None, *path, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")
    command = find_command(path)
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"


def test_the_summaries_of_the_root_are_those_of_the_commands() -> None:
    context = click.Context(root)
    shown = run(None, "--help").stdout
    for name, subcommand in SUBCOMMANDS.items():
        assert root.get_command(context, name) is not None
        assert subcommand.summary in shown


def test_version() -> None:
    form = " (compiled)" if is_compiled() else ""
    assert run(None, "version").stdout == f"semel {__version__}{form}\n"
    assert run(None, "--version").stdout == f"semel {__version__}\n"
    shown = {"version": __version__, "compiled": is_compiled()}
    assert json.loads(run(None, "version", "-o", "json").stdout) == shown


@pytest.mark.parametrize("path", all_commands(), ids=" ".join)
def test_every_command_has_an_output_for_programs(path: tuple[str, ...]) -> None:
    command = find_command(path)
    if isinstance(command, click.Group) or path in WITHOUT_OUTPUT:
        return
    options = {name for parameter in command.params for name in parameter.opts}
    assert {"--output", "-o"} <= options


def test_an_unknown_command_is_wrong_usage() -> None:
    assert run(None, "nonsense").exit_code == 2


def test_topics_are_created_listed_described_and_deleted(broker: FakeBroker) -> None:
    assert run(broker, "topic", "create", "new", "-p", "3", "-c", "retention.ms=5").exit_code == 0
    listed = json.loads(run(broker, "topic", "list", "-o", "json").stdout)
    assert [(topic["name"], topic["partitions"]) for topic in listed] == [("new", 3), ("t", 2)]
    described = json.loads(run(broker, "topic", "describe", "new", "-o", "json").stdout)
    assert [partition["end_offset"] for partition in described["partitions"]] == [0, 0, 0]
    assert described["configs"] == {"retention.ms": {"value": "5", "source": "topic"}}
    assert run(broker, "topic", "delete", "new", "t").exit_code == 0
    assert json.loads(run(broker, "topic", "list", "-o", "json").stdout) == []


def test_changes_of_topics_are_reported_to_people(broker: FakeBroker) -> None:
    assert run(broker, "topic", "create", "new", "-p", "3").stdout == "created new with 3 partitions\n"
    assert run(broker, "topic", "create", "small").stdout == "created small with 1 partition\n"
    assert run(broker, "topic", "create", "new", "--if-not-exists").stdout == "new exists already\n"
    assert run(broker, "topic", "delete", "new", "small").stdout == "deleted new, small\n"


def test_changes_of_topics_are_reported_to_programs(broker: FakeBroker) -> None:
    def report(*arguments: str) -> object:
        return json.loads(run(broker, "topic", *arguments, "-o", "json").stdout)

    assert report("create", "new", "-p", "3") == {"topic": "new", "created": True, "partitions": 3}
    assert report("create", "new", "--if-not-exists") == {
        "topic": "new",
        "created": False,
        "partitions": None,
    }
    assert report("delete", "new", "t") == {"deleted": ["new", "t"]}


def test_tables_are_not_cut_when_they_go_to_a_pipe(broker: FakeBroker) -> None:
    name = "x" * 249
    run(broker, "topic", "create", name)
    assert name in run(broker, "topic", "list").stdout


def test_default_configs_are_shown_on_request(broker: FakeBroker) -> None:
    assert "cleanup.policy" not in run(broker, "topic", "describe", "t").stdout
    assert "cleanup.policy" in run(broker, "topic", "describe", "t", "--all-configs").stdout


def test_a_topic_that_exists_is_exit_code_4_unless_that_is_fine(broker: FakeBroker) -> None:
    result = run(broker, "topic", "create", "t")
    assert result.exit_code == 4
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("semel: topic 't' was not created: TOPIC_ALREADY_EXISTS")
    assert run(broker, "topic", "create", "t", "--if-not-exists").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "describe", "nope"),
        ("topic", "delete", "nope"),
        ("consume", "nope"),
        ("consume", "t", "-p", "9"),
    ],
)
def test_what_does_not_exist_is_exit_code_4(broker: FakeBroker, arguments: tuple[str, ...]) -> None:
    result = run(broker, *arguments)
    assert result.exit_code == 4
    assert result.stderr.startswith("semel: topic")


def test_no_broker_is_exit_code_3_and_names_the_address() -> None:
    result = run(None, "topic", "list", "--bootstrap", "127.0.0.1:1")
    assert result.exit_code == 3
    assert (
        result.stderr
        == "semel: cannot connect to 127.0.0.1:1: connection refused; is a broker running there?\n"
    )


@pytest.mark.parametrize("command", ["status", "forget"])
def test_a_sink_that_does_not_exist_is_exit_code_4(broker: FakeBroker, command: str) -> None:
    result = run(broker, "sink", command, "nope")
    assert result.exit_code == 4
    assert result.stderr == (
        "semel: there is no sink 'nope' with a marker: look for it with `semel sink list`\n"
    )


@pytest.mark.parametrize(
    "address",
    [("--postgres", "host=127.0.0.1 port=1 user=u dbname=d"), ("--mysql", "mysql://u@127.0.0.1:1/d")],
    ids=lambda address: address[0],
)
def test_no_database_is_exit_code_3(address: tuple[str, str]) -> None:
    result = run(None, "sink", "list", *address)
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("semel: the database cannot be opened: ")
    assert "refused" in result.stderr
    assert result.stderr.endswith("Is the server running, and is this its address?\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "list", "-b", "a:b"),
        ("topic", "alter", "t"),
        ("topic", "create", "x", "-c", "novalue"),
        ("topic", "create", "x", "-p", "0"),
        ("consume", "t", "--format", "%q"),
        ("consume", "t", "--from", "nowhere"),
        ("consume", "t", "--from", "@noon"),
        ("produce", "t", "--format", "json", "--key-separator", ":"),
        ("produce", "t", "--key-separator", ""),
        ("produce", "t", "--compression", "rar"),
        ("serve", "--in-memory", "--data", "x"),
        ("config", "show", "--set", "no.such.setting=1"),
        ("bench", "requests", "--in-flight", "6"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(broker: FakeBroker, arguments: tuple[str, ...]) -> None:
    result = run(broker, *arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("beginning", BEGINNING),
        ("end", END),
        ("0", Start(offset=0)),
        ("12", Start(offset=12)),
        ("@1700000000000", Start(timestamp_ms=1700000000000)),
        ("@2023-11-14T22:13:20Z", Start(timestamp_ms=1700000000000)),
        ("@2023-11-14T22:13:20", Start(timestamp_ms=1700000000000)),
        ("@2023-11-14T23:13:20+01:00", Start(timestamp_ms=1700000000000)),
    ],
)
def test_places_to_begin_are_read(text: str, start: Start) -> None:
    assert parse_start(text) == start


def test_consume_prints_up_to_the_end(broker: FakeBroker) -> None:
    fill(broker, "t", 0, Record(b"k", b"v0", 7), Record(None, b"v1", 8))
    result = run(broker, "consume", "t", "-p", "0", "-e", "-f", "%o %T [%k] %v\\n")
    assert result.exit_code == 0
    assert result.stdout == "0 7 [k] v0\n1 8 [] v1\n"


def test_consume_stops_after_so_many_records(broker: FakeBroker) -> None:
    fill(broker, "t", 0, *(Record(None, b"%d" % number, 0) for number in range(10)))
    assert run(broker, "consume", "t", "--max", "3").stdout == "0\n1\n2\n"


def test_consume_begins_where_it_is_told(broker: FakeBroker) -> None:
    fill(broker, "t", 0, *(Record(None, b"%d" % number, number * 10) for number in range(5)))
    assert run(broker, "consume", "t", "-p", "0", "-e", "--from", "3").stdout == "3\n4\n"
    assert run(broker, "consume", "t", "-p", "0", "-e", "--from", "@25").stdout == "3\n4\n"
    assert run(broker, "consume", "t", "-p", "0", "-e", "--from", "end").stdout == ""


def test_consume_past_the_end_is_an_error(broker: FakeBroker) -> None:
    fill(broker, "t", 0, Record(None, b"v", 0))
    result = run(broker, "consume", "t", "-p", "0", "-e", "--from", "9")
    assert result.exit_code == 1
    assert "offset 9" in result.stderr


def test_config_shows_where_each_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "semel.properties"
    file.write_text("# a comment\nnum.partitions=4\nnode.id=9\n")
    result = CliRunner().invoke(
        root,
        ["config", "show", "--changed", "-o", "json", "--config", str(file), "--set", "node.id=3"],
        env={"SEMEL_DURABILITY": "os"},
    )
    shown = {entry["name"]: (entry["value"], entry["source"]) for entry in json.loads(result.stdout)}
    assert shown == {
        "num.partitions": ("4", f"{file}:2"),
        "durability": ("os", "environment SEMEL_DURABILITY"),
        "node.id": ("3", "flag"),
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(shell: str) -> None:
    result = run(None, "completion", shell)
    assert result.exit_code == 0
    assert "_SEMEL_COMPLETE" in result.stdout


def test_topic_names_are_completed(broker: FakeBroker) -> None:
    result = CliRunner().invoke(
        root,
        [],
        prog_name="semel",
        env={
            "_SEMEL_COMPLETE": "bash_complete",
            "COMP_WORDS": "semel consume ",
            "COMP_CWORD": "2",
            "SEMEL_BOOTSTRAP": broker.bootstrap,
        },
    )
    assert "plain,t" in result.stdout


def test_completion_is_silent_without_a_broker() -> None:
    result = CliRunner().invoke(
        root,
        [],
        prog_name="semel",
        env={
            "_SEMEL_COMPLETE": "bash_complete",
            "COMP_WORDS": "semel consume ",
            "COMP_CWORD": "2",
            "SEMEL_BOOTSTRAP": "127.0.0.1:1",
        },
    )
    assert result.stdout.strip() == ""
    assert result.stderr == ""
