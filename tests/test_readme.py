import re
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, run, snippets

README = (ROOT / "README.md").read_text()


def test_every_snippet_runs_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    found = snippets(README)
    assert len(found) >= 5
    names: dict[str, Any] = {}
    for snippet in found:
        run(snippet, "README.md", names)


def test_every_command_names_a_file_that_is_there() -> None:
    named = re.findall(r"\b(?:configs|tests|benchmarks|notebooks)/[\w/.]+\w", README)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
