"""What other users of a machine leave behind, for tests that run as root or as anybody."""

import os


def belongs_to_another(path, monkeypatch):
    """Let `path` belong to another user than the one that this process runs as."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
