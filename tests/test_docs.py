"""What the documents show works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readmes_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_the_readme_has_two_set_up_commands():
    commands = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert commands == [
        "pip install '.[demo]' && python -m memopt demo\n",
        "pip install '.[test]' && pytest\n",
    ]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *ROOT.glob("docs/*.md")], ids=str)
def test_links_lead_somewhere(page):
    page = ROOT / page
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tests_that_pages_name_exist():
    defined = set()
    for file in (ROOT / "tests").glob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/numerics.md").read_text()))
    assert named
    assert named <= defined, f"docs/numerics.md names {sorted(named - defined)}"
