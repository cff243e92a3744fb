"""Reading a journal: what counts, what is cut, what is refused."""

import re

import pytest
from journal_cases import DIRECTORY, Life, disk_with, journal_files, written_file

from semel.errors import CorruptionError
from semel.journal.chain import CHUNK_BYTES, Chain
from semel.journal.files import JournalName
from semel.journal.format import FILE_HEADER_BYTES, FileHeader, Seal, encode_file_header, encode_group
from semel.testing.simdisk import SimDisk

FAR = 10**9  # a lag so large that a group claims nothing


def entries(chain: Chain) -> list[bytes]:
    return [bytes(entry) for group in chain.groups(chain.start) for entry in group.entries]


def test_an_empty_directory_is_an_empty_journal() -> None:
    chain = Chain.open(disk_with(), DIRECTORY)
    assert (chain.start, chain.end, chain.generation, chain.torn) == (0, 0, 0, None)
    assert list(chain.groups(0)) == []


def test_a_write_torn_at_any_byte_is_cut_to_whole_groups() -> None:
    groups = [(FAR, [b"a" * 30, b"b"]), (FAR, [b"c" * 700]), (FAR, [b"d", b"", b"e" * 90])]
    name, content, bounds = written_file(groups)
    expected = [entry for _, group in groups for entry in group]
    for size in range(FILE_HEADER_BYTES, len(content) + 1):
        torn = content[:size].ljust(len(content) + 2000, b"\0")
        chain = Chain.open(disk_with((name, torn)), DIRECTORY)
        whole = sum(bound <= size - FILE_HEADER_BYTES for bound in bounds[1:])
        assert chain.end == bounds[whole]
        assert entries(chain) == expected[: sum(len(group) for _, group in groups[:whole])]


def test_sectors_of_an_unfinished_write_may_reach_the_disk_in_any_order() -> None:
    groups = [(FAR, [bytes([number]) * 300]) for number in range(1, 12)]
    name, content, bounds = written_file(groups)
    sectors = range(FILE_HEADER_BYTES // 512, len(content) // 512 + 1)
    for missing in sectors:
        for also_missing in sectors:
            torn = bytearray(content)
            for sector in (missing, also_missing):
                torn[sector * 512 : (sector + 1) * 512] = bytes(len(torn[sector * 512 : (sector + 1) * 512]))
            chain = Chain.open(disk_with((name, bytes(torn))), DIRECTORY)
            first_hole = min(missing, also_missing) * 512 - FILE_HEADER_BYTES
            whole = sum(bound <= first_hole for bound in bounds[1:])
            assert chain.end == bounds[whole]
            assert entries(chain) == [group[0] for _, group in groups[:whole]]


def test_what_was_cut_is_reported() -> None:
    name, content, bounds = written_file([(FAR, [b"one"]), (FAR, [b"two"]), (FAR, [b"three"])])
    damaged = bytearray(content)
    damaged[FILE_HEADER_BYTES + bounds[2] - 1] ^= 1
    chain = Chain.open(disk_with((name, bytes(damaged))), DIRECTORY)
    assert chain.torn is not None
    assert (chain.torn.position, chain.torn.later_groups) == (bounds[1], 2)
    assert chain.torn.path.name == name


def test_damage_below_a_claim_is_corruption_wherever_it_is() -> None:
    name, content, bounds = written_file([(0, [b"one" * 9]), (0, [b"two" * 200]), (0, [b"three"])])
    for offset in range(FILE_HEADER_BYTES, FILE_HEADER_BYTES + bounds[2]):
        damaged = bytearray(content)
        damaged[offset] ^= 0x10
        position = max(bound for bound in bounds if bound <= offset - FILE_HEADER_BYTES)
        pattern = f"{re.escape(name)} is damaged at position {position} .byte {FILE_HEADER_BYTES + position} "
        with pytest.raises(CorruptionError, match=pattern):
            Chain.open(disk_with((name, bytes(damaged))), DIRECTORY)


def test_a_header_is_evidence_even_if_its_body_was_torn() -> None:
    name, content, bounds = written_file([(0, [b"one"]), (0, [b"two" * 100])])
    damaged = bytearray(content[:-1])
    damaged[FILE_HEADER_BYTES + 45] ^= 1
    with pytest.raises(CorruptionError, match=f"everything below position {bounds[1]} was durable"):
        Chain.open(disk_with((name, bytes(damaged))), DIRECTORY)


def test_evidence_is_found_across_the_borders_of_chunks() -> None:
    for shift in range(-60, 60):
        filler = CHUNK_BYTES + shift
        name, content, _ = written_file([(0, [b"one"]), (0, [bytes(filler)]), (0, [b"three"])])
        damaged = bytearray(content)
        damaged[FILE_HEADER_BYTES + 100] ^= 1
        with pytest.raises(CorruptionError):
            Chain.open(disk_with((name, bytes(damaged))), DIRECTORY)


def test_what_the_caller_knows_is_evidence_too() -> None:
    name, content, bounds = written_file([(FAR, [b"one"]), (FAR, [b"two"])])
    disk = disk_with((name, content[:-1]))
    assert Chain.open(disk, DIRECTORY, synced=bounds[1]).end == bounds[1]
    with pytest.raises(CorruptionError, match=f"everything below position {bounds[2]} was durable"):
        Chain.open(disk, DIRECTORY, synced=bounds[2])


def test_a_damaged_or_foreign_file_header_is_corruption() -> None:
    name, content, _ = written_file([(0, [b"one"])])
    damaged = bytearray(content)
    damaged[20] ^= 1
    with pytest.raises(CorruptionError, match="checksum is wrong"):
        Chain.open(disk_with((name, bytes(damaged))), DIRECTORY)
    with pytest.raises(CorruptionError, match="disagree"):
        Chain.open(disk_with((str(JournalName(2, 0)), content)), DIRECTORY)
    with pytest.raises(CorruptionError, match="it has 0 bytes"):
        Chain.open(disk_with((name, b"")), DIRECTORY)


def test_a_later_generation_voids_what_lies_at_or_beyond_its_base() -> None:
    first, old, bounds = written_file([(0, [b"one"]), (0, [b"two"]), (0, [b"three"])])
    second, new, new_bounds = written_file([(0, [b"TWO"])], generation=2, base=bounds[1])
    chain = Chain.open(disk_with((first, old), (second, new)), DIRECTORY)
    assert entries(chain) == [b"one", b"TWO"]
    assert (chain.end, chain.generation) == (new_bounds[1], 2)


def test_files_that_are_void_as_a_whole_are_not_even_opened() -> None:
    first, old, bounds = written_file([(0, [b"one"])])
    void, void_content, _ = written_file([(0, [b"no"])], generation=2, base=bounds[1])
    third, new, _ = written_file([(0, [b"two"])], generation=3, base=bounds[1])
    chain = Chain.open(disk_with((first, old), (void, void_content[:100]), (third, new)), DIRECTORY)
    assert entries(chain) == [b"one", b"two"]
    assert [path.name for path in chain.void_paths] == [void]


def test_a_hole_in_any_file_but_the_last_is_corruption() -> None:
    first, old, bounds = written_file([(FAR, [b"one"]), (FAR, [b"two"])])
    second, new, _ = written_file([(FAR, [b"three"])], base=bounds[2])
    chain = Chain.open(disk_with((first, old[:-1]), (second, new)), DIRECTORY)
    with pytest.raises(CorruptionError, match=f"{first} is damaged at position {bounds[1]}"):
        list(chain.groups(0))


def test_a_missing_file_is_noticed() -> None:
    _, _, bounds = written_file([(0, [b"one"])])
    second, new, new_bounds = written_file([(0, [b"two"])], base=bounds[1])
    chain = Chain.open(disk_with((second, new)), DIRECTORY)
    assert entries(chain) == [b"two"]
    with pytest.raises(CorruptionError, match=f"holds positions {bounds[1]} to {new_bounds[1]}.*begin at 0"):
        list(chain.groups(0))


def test_reading_begins_at_any_group() -> None:
    name, content, bounds = written_file([(0, [bytes([number])]) for number in range(5)])
    chain = Chain.open(disk_with((name, content)), DIRECTORY)
    for index, bound in enumerate(bounds):
        groups = list(chain.groups(bound))
        assert [group.position for group in groups] == bounds[index:-1]
        assert [bytes(entry) for group in groups for entry in group.entries] == [
            bytes([number]) for number in range(index, 5)
        ]


def test_groups_larger_than_a_chunk_are_read_whole() -> None:
    large = bytes(range(256)) * (CHUNK_BYTES // 256 * 3)
    name, content, _ = written_file([(0, [b"one"]), (0, [large, b"x"]), (0, [b"three"])])
    chain = Chain.open(disk_with((name, content)), DIRECTORY)
    assert entries(chain) == [b"one", large, b"x", b"three"]


def test_old_bytes_in_a_reused_file_are_never_groups_again() -> None:
    # The worst case: the same generation and salt, and groups that lie exactly where new ones would.
    _, old, _ = written_file([(0, [bytes([number]) * 50]) for number in range(40)])
    name, new, bounds = written_file([(0, [b"new" * 10])], base=5000)
    reused = new + old[len(new) :]
    chain = Chain.open(disk_with((name, reused)), DIRECTORY)
    assert (entries(chain), chain.end, chain.torn) == ([b"new" * 10], bounds[1], None)


def test_a_client_cannot_forge_evidence() -> None:
    # A client knows the generation (the leader epoch) and may guess positions, but not the salt.
    name, content, bounds = written_file([(FAR, [b"one"])])
    position = bounds[1] + 44
    forged = b"".join(encode_group(Seal(1, 0x1234), position, position, [])[0])
    seal = Seal(1, 0x5EED_0F_A_5EA1)
    torn = b"".join(encode_group(seal, bounds[1], 0, [[forged + bytes(500)]])[0])[:-1]
    chain = Chain.open(disk_with((name, content + torn)), DIRECTORY)
    assert (entries(chain), chain.end) == ([b"one"], bounds[1])


def test_a_snapshot_position_that_was_cut_is_recognised() -> None:
    seal = Seal(2, 1)
    header = encode_file_header(FileHeader(seal, 800, 1000))
    disk = disk_with((str(JournalName(2, 800)), header))
    chain = Chain.of_files(disk, DIRECTORY)
    assert chain.was_cut_below(1001, 1)
    assert not chain.was_cut_below(1000, 1)
    assert not chain.was_cut_below(1001, 2)


def test_what_was_found_is_copied_before_anything_is_built_on_it() -> None:
    # A sync fails, the process dies before it could recover, and the cache still shows the groups.
    disk = SimDisk(3)
    life = Life(disk)
    life.write(b"durable")
    disk.faults.fail_next("sync")
    life.write(b"in the cache only")
    assert life.failures
    # Not `kill`: here the kernel keeps every page, which is what makes it dangerous.
    later = Life(disk)
    found = later.found()
    assert found in ([b"durable", b"in the cache only"], [b"durable"])
    later.write(b"built on it")
    for _ in range(3):
        disk.crash()
        later = Life(disk)
        assert later.found() == [*found, b"built on it"]


def test_a_restart_gives_back_the_room_of_the_old_file() -> None:
    disk = SimDisk(4)
    for number in range(20):
        life = Life(disk)
        life.write(b"group %d" % number)
        disk.kill()
    sizes = [len(disk.content(path)) for path in journal_files(disk)]
    assert sum(size > 3 * FILE_HEADER_BYTES for size in sizes) == 1
    assert Life(disk).found() == [b"group %d" % number for number in range(20)]
