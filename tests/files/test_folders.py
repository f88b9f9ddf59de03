# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are source code."""

from files.folders import source_files


def test_what_editors_and_systems_leave_beside_a_file_is_not_source_code(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a-checkpoint.py").touch()
    for name in ("b.py", "a.py", "below/c.py", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".#a.py").symlink_to("user@host.1234")  # of Emacs, to nothing
    (tmp_path / "gone.py").symlink_to("nowhere")
    (tmp_path / "below" / "._c.py").write_bytes(b"\xff\xfe")  # of macOS
    assert [str(path.relative_to(tmp_path)) for path in source_files(tmp_path)] == ["a.py", "b.py", "below/c.py"]
    assert [path.name for path in source_files(tmp_path, "*.py")] == ["a.py", "b.py"]
