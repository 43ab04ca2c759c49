"""Docstrings and comments of the packages use the terms of JAX, XLA and Shardy."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("meshpar", "meshpar_kernels", "examples")
BANNED = {
    r"way back": "backward pass",
    r"products? (?:beside|whose|of which|that)": "matmuls",
    r"whole sums?|sent whole|sums? whole": "all-reduce followed by a local slice",
    r"unreduced": "partial",
    r"beside": "overlapped with, concurrently with; compared with; next to",
    r"lies|comes? to lie": "is sharded, is placed, is stored",
    r"stands? (?:apart|elsewhere)": "is a separate kernel, is separate",
    r"(?:left|held|kept|lies) whole": "replicated, unsharded",
    r"at rest|rests": "stored sharding",
    r"under way": "in flight",
    r"sent (?:for )?ahead": "prefetched",
    r"in turn": "sequentially",
    r"(?:kept|stands?|told|set) apart": "separate, distinguished",
    r"goes on beside|goes on while": "is asynchronous; continues",
    r"(?:sent|gathered|summed) in blocks": "chunked, as a ring",
    r"parts side by side": "interleaved microbatches",
    r"anew": "again; rewritten",
    r"(?:came|comes) to (?:be|lie|this|the same|what)": "resulted in, amounts to",
    r"(?<!there )(?:is|are) none": "is not a ...; None",
    r"taken for": "treated as",
    r"w(?:as|ere) seen to": "was observed to",
    r"mend(?:ed|s)?": "fix",
    r"settle[sd]?": "reduce; determine",
    r"priced|dear(?:er)?": "costed; expensive",
    r"features? with (?:their|its) position": "rotary position embedding",
}
"""Pattern → terms to use instead."""
ANY = re.compile("|".join(BANNED), re.IGNORECASE)
"""Most files have none of them, not even in code, and need not be parsed."""


def prose(source: str) -> list[tuple[int, str]]:
    """(line number, text) of each line of the docstrings and comments of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines += enumerate(node.value.value.splitlines(), node.lineno)
    return lines


def matches(folder: str) -> list[str]:
    """``"file:line: match: use these terms"`` for every banned phrase of a folder."""
    out = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_text()
        for number, text in prose(source) if ANY.search(source.replace("is None", "")) else ():
            for pattern, terms in BANNED.items():
                for match in re.finditer(rf"\b(?:{pattern})\b", text[:1].lower() + text[1:]):
                    where = f"{path.relative_to(ROOT)}:{number}"
                    out.append(f"{where}: {match.group()!r} in {text.strip()!r}: {terms}")
    return out


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_uses_standard_terms(folder):
    found = matches(folder)
    assert not found, "\n".join(found)


def test_a_banned_phrase_is_reported(tmp_path, monkeypatch):
    (tmp_path / "meshpar").mkdir()
    (tmp_path / "meshpar" / "a.py").write_text('"""Done on the way back.\n\nBeside it."""\nx = "beside"  # taken for\n')
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert [line.split(":")[1] for line in matches("meshpar")] == ["4", "1", "3"]
