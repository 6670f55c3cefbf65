from pathlib import Path

import pytest

from envs.swebench.errors import BuildFailed, PatchDoesNotApply
from envs.swebench.faults import diff
from envs.swebench.tools import Tools
from envs.swebench.trees import apply_patch

TOOLS = Tools.within(3600.0)  # counts from the import of this file
OLD, NEW = "one\ntwo\nthree\n", "one\n2\nthree\n"


@pytest.mark.parametrize("fuzz", [True, False])
@pytest.mark.parametrize("windows_patch", [True, False])
@pytest.mark.parametrize("windows_file", [True, False])
def test_a_patch_with_the_other_line_ends_leaves_the_files_own(
    tmp_path: Path, fuzz: bool, windows_patch: bool, windows_file: bool
) -> None:
    def ended(text: str, windows: bool) -> bytes:
        return (text.replace("\n", "\r\n") if windows else text).encode()

    (tmp_path / "a.txt").write_bytes(ended(OLD, windows_file))
    made = apply_patch(tmp_path, ended(diff("a.txt", OLD, NEW), windows_patch).decode(), TOOLS, fuzz=fuzz)
    assert made["a.txt"].data == ended(NEW, windows_file)


def test_one_patch_of_files_with_either_line_ends(tmp_path: Path) -> None:
    (tmp_path / "dos.txt").write_bytes(OLD.replace("\n", "\r\n").encode())
    (tmp_path / "unix.txt").write_text(OLD)
    made = apply_patch(tmp_path, diff("dos.txt", OLD, NEW) + diff("unix.txt", OLD, NEW), TOOLS)
    assert made["dos.txt"].data == NEW.replace("\n", "\r\n").encode() and made["unix.txt"].data == NEW.encode()


def test_a_patch_for_another_text_does_not_apply(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("nothing\nof the\nkind\n")
    with pytest.raises(PatchDoesNotApply):
        apply_patch(tmp_path, diff("a.txt", OLD, NEW), TOOLS)


def test_a_failed_command_is_told_in_one_line(tmp_path: Path) -> None:
    script = "echo Collecting x; echo 'ERROR: no version of x'; echo '  ERROR: No matching distribution'; exit 1"
    with pytest.raises(BuildFailed, match=r"failed: ERROR: no version of x; ERROR: No matching distribution$"):
        TOOLS.run(["sh", "-c", script], tmp_path)
    with pytest.raises(BuildFailed, match=r"failed: first; last$"):
        TOOLS.run(["sh", "-c", "echo first; echo last; exit 1"], tmp_path)
