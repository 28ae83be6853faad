import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_every_snippet_runs_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) >= 5
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)


def test_every_command_names_a_file_that_is_there() -> None:
    named = re.findall(r"\b(?:configs|tests|benchmarks|notebooks)/[\w/.]+\w", README)
    assert named
    for name in named:
        assert (Path(__file__).parent.parent / name).exists(), name
