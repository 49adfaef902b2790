"""Docstrings repeat the noun instead of `that of` and `likewise`, and begin with a verb or the thing itself."""

import ast
import re
from collections import Counter
from pathlib import Path

import polyak

ROOT = Path(polyak.__file__).parent
ELLIPSIS = re.compile(r"\b(?:that|those) of\b|\bthe same of\b|\blikewise\b|\bthose (?:that|which|who)\b", re.IGNORECASE)
OPENING = re.compile(r"(?:What|Whether|Where|Which|How|As)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_docstrings_have_few_ellipses_and_openings_with_a_question_word():
    ellipses, openings, lines, count = Counter(), Counter(), 0, 0
    for path in sorted(ROOT.rglob("*.py")):
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED))
        for text in filter(None, map(ast.get_docstring, nodes)):
            lines, count = lines + text.count("\n") + 1, count + 1
            ellipses[str(path.relative_to(ROOT))] += len(ELLIPSIS.findall(text))
            openings[str(path.relative_to(ROOT))] += bool(OPENING.match(text))
    assert lines > 1000
    per_thousand, percent = 1000 * ellipses.total() / lines, 100 * openings.total() / count
    assert per_thousand <= 5, f"{per_thousand:.1f} ellipses in 1,000 lines of docstrings, most in {ellipses.most_common(5)}"
    assert percent <= 1, f"{percent:.1f} % of docstrings begin with a question word, most in {openings.most_common(5)}"
