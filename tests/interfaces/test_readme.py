"""The README keeps its word: its code runs, its paths exist."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.search(r"```python\n(.+?)```", README, re.DOTALL).group(1)


def test_the_code_is_the_example_file():
    example = (ROOT / "examples" / "my_agent.py").read_text(encoding="utf-8")
    assert example.split('"""\n\n', 1)[1] == CODE


def test_the_code_runs_as_given(tmp_path, monkeypatch, capsys):
    short = CODE.replace('"train.max_steps": 15', '"train.max_steps": 1')
    assert short != CODE
    (tmp_path / "my_agent.py").write_text(short)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("my_agent.py", run_name="__main__")
    assert re.search(r"\d+% -> \d+% of the held-out cases pass", capsys.readouterr().out)


def test_what_it_links_to_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_every_room_has_its_line_in_the_tree():
    rooms = {p.name for p in (ROOT / "src" / "palestra").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert {room for room in rooms if f"\n  {room}/ " not in README} == set()
