from __future__ import annotations

import ast
import hashlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

from xmod_jax.data import embedded
from xmod_jax.errors import UserError


@pytest.fixture(scope="module")
def corpus() -> dict[str, str]:
    return dict(embedded.documents())


def test_documents_are_sorted_by_name(corpus):
    assert list(corpus) == sorted(corpus)


def test_there_are_four_megabytes(corpus):
    assert sum(len(text.encode()) for text in corpus.values()) > 4_000_000


def test_most_of_it_is_english(corpus):
    # The commonest words make up about a quarter of English prose, and next to nothing of code.
    text = " ".join(corpus.values()).lower()
    words = re.findall(r"[a-z]+", text)
    common = {"the", "of", "to", "a", "is", "in", "and", "that", "this", "for", "be", "if", "not"}
    assert sum(word in common for word in words) > 0.12 * len(words)
    letters_and_spaces = sum(character.isalpha() or character.isspace() for character in text)
    assert letters_and_spaces > 0.8 * len(text)


def test_another_process_reads_the_same_corpus(corpus):
    script = (
        "import hashlib; from xmod_jax.data.embedded import documents;"
        "print(hashlib.sha256(repr(dict(documents())).encode()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == hashlib.sha256(repr(corpus).encode()).hexdigest()


def test_docstrings_that_a_parser_finds_are_in_the_corpus(corpus):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for name in ("difflib.py", "textwrap.py", "argparse.py", "bdb.py", "ast.py", "glob.py"):
        source = (pathlib.Path(sysconfig.get_path("stdlib")) / name).read_text("utf-8")
        squeezed = " ".join(corpus[name].split())  # whole modules keep their indentation
        for node in ast.walk(ast.parse(source)):
            docstring = ast.get_docstring(node) if isinstance(node, documented) else None
            if docstring:
                found.append(" ".join(docstring.split()) in squeezed)
    assert len(found) > 100
    assert sum(found) > 0.9 * len(found)  # escapes stay as written, repetitions count once


def test_prose_of_a_module_keeps_its_order_and_leaves_code_out():
    source = inspect.cleandoc('''
        #!/usr/bin/env python3
        """Module text."""
        import os
        USAGE = """
        data, not a docstring
        """
        # A comment that says
        # something useful here.
        x = 1  # trailing remark on code
        #------
        def documented(first, second=(1, 2),
                       third=None) -> int:
            """Does it.

                indented
            as it stands
            """
            return 1
        def bare():
            return """no docstring"""
        class Thing(Base):
            r"""A thing."""
    ''')
    assert list(embedded._prose(source)) == [
        "Module text.",
        "A comment that says\nsomething useful here.",
        "def documented(first, second=(1, 2), third=None) -> int:\nDoes it.\n\n    indented\n"
        "as it stands",
        "class Thing(Base):\nA thing.",
    ]


def test_tests_and_installed_packages_stay_out(corpus):
    for name in corpus:
        assert not {"test", "tests", "site-packages"} & set(name.split("/"))


def test_no_topic_is_part_of_another(corpus):
    bodies = {
        name: text.split("\n", 2)[-1].strip()
        for name, text in corpus.items()
        if name.startswith("topics/")
    }
    assert len(bodies) > 40
    for name, body in bodies.items():
        longer = [
            text
            for other, text in corpus.items()
            if other.startswith("topics/") and len(text) > len(corpus[name])
        ]
        assert not any(body in text for text in longer)


@pytest.mark.parametrize("folder", ["", "missing"])
def test_python_without_library_sources_is_refused_in_one_line(monkeypatch, tmp_path, folder):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / folder))
    with pytest.raises(UserError, match="no library sources") as error:
        embedded.documents()
    assert "\n" not in str(error.value)
