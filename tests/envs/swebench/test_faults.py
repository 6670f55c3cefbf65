import ast

from hypothesis import given
from hypothesis import strategies as st

from envs.swebench.faults import apply_fault, diff, find_faults

SOURCE = '''def check(a, b, flag=True):
    """Says whether 1 < 2 and so on."""
    if a == b and not flag:
        return a + 1
    é = "ü" if a in b else None
    for i in range(3):
        if (a is
                None):
            return é
    return None
'''


def test_faults_are_one_line_each_and_parse() -> None:
    faults = find_faults("m.py", SOURCE)
    wrong = {fault.wrong.strip() for fault in faults}
    assert {
        "def check(a, b, flag=False):",
        "if a != b and not flag:",
        "if a == b or not flag:",
        "if a == b and flag:",
        "return a - 1",
        "return a + 2",
        "return None",
        'é = "ü" if a not in b else None',
        "for i in range(4):",
    } == wrong
    for fault in faults:
        changed = apply_fault(SOURCE, fault)
        ast.parse(changed)
        different = [pair for pair in zip(SOURCE.split("\n"), changed.split("\n"), strict=True) if pair[0] != pair[1]]
        assert different == [(fault.right, fault.wrong)]


def test_what_does_not_parse_has_no_faults() -> None:
    assert find_faults("m.py", "def (:") == []


@given(st.lists(st.sampled_from(["a < b", "not a", "[1, 2]", "'é' + b", "a or b"]), max_size=6))
def test_every_fault_changes_its_line(lines: list[str]) -> None:
    source = "".join(f"x{number} = {line}\n" for number, line in enumerate(lines))
    for fault in find_faults("m.py", source):
        assert fault.right != fault.wrong
        assert diff("m.py", source, apply_fault(source, fault)).count("\n+") == 2  # the header's and the line
