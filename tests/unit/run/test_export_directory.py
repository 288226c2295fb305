"""The directory that an export fills."""

import os

from omnitrain.export import new_directory


def test_every_file_may_be_read_by_those_who_may_read_new_files_here(tmp_path):
    old = os.umask(0o027)
    try:
        with new_directory(tmp_path / "out") as folder:
            (folder / "weights").write_text("w")
            (folder / "weights").chmod(0o600)
    finally:
        os.umask(old)
    assert (tmp_path / "out" / "weights").stat().st_mode & 0o777 == 0o640
