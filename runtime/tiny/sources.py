"""Where the training text lies on a machine, by domain, with its licence. Nothing is downloaded.

Every source is optional: what is installed is used. A domain with no source at all is an error of
:mod:`runtime.tiny.corpus`, which names the packages that would help.
"""

from __future__ import annotations

import gzip
import html
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MAN = Path("/usr/share/man")
_REFERENCE = Path("/usr/share/debian-reference")
_FORTUNES = Path("/usr/share/games/fortunes")
_LARGEST_FILE = 200_000
_BLOCK = 4_000
_ANSI = re.compile(r"\x1b?\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text that is held out or trained on as a whole."""

    source: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """A place that text comes from. ``prompts``: its texts may be redistributed inside this package."""

    name: str
    domain: str
    package: str
    licence: str
    cap: int
    """Bytes used for training at most, so that no source drowns the others of its domain."""
    prompts: bool
    read: Callable[[], Iterator[Document]]


def _read_text(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return raw.decode("utf-8", errors="replace")


def _python() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if left_out.isdisjoint(relative.parts) and path.stat().st_size <= _LARGEST_FILE:
            yield Document("python-stdlib", relative.as_posix(), _read_text(path))


def _bible() -> Iterator[Document]:
    """One document a chapter, the verse numbers taken off, from the ``bible`` command of Debian's bible-kjv."""
    command = shutil.which("bible")
    if command is None:
        return
    result = subprocess.run(
        [command, "-f", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True
    )
    chapter, verses = "", list[str]()
    for line in result.stdout.decode("utf-8", errors="replace").splitlines():
        found = re.match(r"(\w+?\d+):\d+ (.*)", line)
        if found is None:
            continue
        if found[1] != chapter and verses:
            yield Document("bible-kjv", chapter, "\n".join(verses) + "\n")
            verses = []
        chapter = found[1]
        verses.append(found[2])
    if verses:
        yield Document("bible-kjv", chapter, "\n".join(verses) + "\n")


def _rust_books() -> Iterator[Document]:
    """The paragraphs of the Rust books (HTML), one document a page; code blocks are left out."""
    roots = [
        *sorted(Path.home().glob(".rustup/toolchains/*/share/doc/rust/html")),
        Path("/usr/share/doc/rust-doc/html"),
    ]
    root = next((r for r in reversed(roots) if r.is_dir()), None)
    if root is None:
        return
    books = (
        "book",
        "reference",
        "cargo",
        "nomicon",
        "edition-guide",
        "rustc",
        "rustdoc",
        "embedded-book",
        "style-guide",
    )
    for path in (p for book in books for p in sorted((root / book).rglob("*.html"))):
        if path.name in {"print.html", "toc.html", "404.html", "SUMMARY.html"}:
            continue
        marked = re.findall(r"<p>(.*?)</p>", _read_text(path), flags=re.DOTALL)
        paragraphs = (html.unescape(re.sub(r"<[^>]+>", "", p)).strip() for p in marked)
        text = "\n\n".join(p for p in paragraphs if not p.startswith("Press "))  # the page's keyboard help
        if len(text) > 200:
            yield Document("rust-books", path.relative_to(root).as_posix(), text + "\n")


def plain_roff(text: str) -> str:
    """Readable text of a man page: macros and font changes dropped, their words kept. No layout is attempted."""
    lines = list[str]()
    for line in text.splitlines():
        if line.startswith((".TH", '.\\"', "'\\\"", ".de", ".ds", ".if", ".ie", ".el", ".nr", ".tr", ".so")):
            continue
        found = re.match(r"[.'][ \t]*([A-Za-z0-9]*)[ \t]*(.*)", line)
        if found is not None:
            macro, rest = found[1], found[2]
            if macro in {"SH", "SS"}:
                lines.append("")
            if macro not in {"SH", "SS", "B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SB", "SM"}:
                if macro in {"PP", "P", "LP", "TP", "IP"}:
                    lines.append("")
                continue
            separator = "" if len(macro) == 2 and macro not in {"SH", "SS"} else " "
            line = separator.join(re.findall(r'"[^"]*"|\S+', rest)).replace('"', "")
        lines.append(line)
    joined = "\n".join(lines)
    joined = re.sub(r"\\f(\[[^\]]*\]|\(..|.)", "", joined)
    joined = re.sub(r"\\\[(bu|em|en)\]", "-", joined)
    joined = re.sub(r"\\\[[^\]]*\]|\\\(..|\\s[-+]?\d|\\[&|/,^c]|\\m\[[^\]]*\]|\\\*\([^ ]{2}", "", joined)
    joined = joined.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\~", " ")
    return re.sub(r"\n{3,}", "\n\n", joined).strip() + "\n"


def _man_pages(source: str, root: Path, sections: tuple[str, ...]) -> Iterator[Document]:
    for section in sections:
        for path in sorted((root / section).glob("*")):
            if not path.is_file() or path.is_symlink() or path.stat().st_size > _LARGEST_FILE:
                continue
            text = plain_roff(_read_text(path))
            if len(text) > 400:
                yield Document(source, f"{section}/{path.name}", text)


def _reference(source: str, path: Path) -> Iterator[Document]:
    """Debian Reference, cut at blank lines into documents of about 4,000 characters; tables are left out."""
    if not path.is_file():
        return
    block, size, number = list[str](), 0, 0
    for line in _read_text(path).splitlines():
        if re.match(r"\s*[|+]", line):
            continue
        block.append(re.sub(r"^ {1,4}", "", line.rstrip()))
        size += len(line)
        if size >= _BLOCK and not line.strip():
            yield Document(source, f"block-{number}", re.sub(r"\n{3,}", "\n\n", "\n".join(block)).strip() + "\n")
            block, size, number = [], 0, number + 1
    yield Document(source, f"block-{number}", re.sub(r"\n{3,}", "\n\n", "\n".join(block)).strip() + "\n")


_CLASSICS = re.compile(r"《(道德经|菜根谭|增广贤文|論語|论语|詩經|诗经|老子|庄子|孙子兵法|围炉夜话|小窗幽记)")


def _fortunes(old: bool) -> Iterator[Document]:
    """Poems and sayings. ``old``: what is centuries old and in nobody's copyright; else the rest, to train on only."""
    for name in ("tang300", "song100", "chinese"):
        path = _FORTUNES / name
        if not path.is_file():
            continue
        for number, entry in enumerate(_read_text(path).split("\n%\n")):
            text = "\n".join(line.strip() for line in _ANSI.sub("", entry).strip().splitlines() if line.strip())
            is_old = name != "chinese" or _CLASSICS.search(text) is not None
            if text and is_old == old:
                yield Document("old-chinese" if old else "fortunes-zh", f"{name}-{number}", text + "\n")


SOURCES: tuple[Source, ...] = (
    Source("python-stdlib", "python", "the Python that runs the training", "PSF-2.0", 8_000_000, True, _python),
    Source("bible-kjv", "english", "Debian bible-kjv", "public domain (1611)", 2_500_000, True, _bible),
    Source(
        "rust-books",
        "english",
        "rustup's rust-docs or Debian rust-doc",
        "MIT OR Apache-2.0",
        2_500_000,
        True,
        _rust_books,
    ),
    Source(
        "debian-reference-en",
        "english",
        "Debian debian-reference-en",
        "GPL-2+",
        1_000_000,
        False,
        lambda: _reference("debian-reference-en", _REFERENCE / "debian-reference.en.txt.gz"),
    ),
    Source(
        "man-pages",
        "english",
        "Debian manpages, manpages-dev",
        "per page: verbatim, GPL, BSD, MIT",
        1_500_000,
        False,
        lambda: _man_pages("man-pages", _MAN, ("man2", "man5", "man7")),
    ),
    Source(
        "old-chinese",
        "chinese",
        "Debian fortunes-zh",
        "public domain (texts centuries old)",
        2_000_000,
        True,
        lambda: _fortunes(True),
    ),
    Source(
        "fortunes-zh",
        "chinese",
        "Debian fortunes-zh",
        "GPL-3+ (collection)",
        2_000_000,
        False,
        lambda: _fortunes(False),
    ),
    Source(
        "debian-reference-zh",
        "chinese",
        "Debian debian-reference-zh-cn",
        "GPL-2+",
        1_500_000,
        False,
        lambda: _reference("debian-reference-zh", _REFERENCE / "debian-reference.zh-cn.txt.gz"),
    ),
    Source(
        "manpages-zh",
        "chinese",
        "Debian manpages-zh",
        "GFDL-1.2+, GPL-2+",
        1_200_000,
        False,
        lambda: _man_pages("manpages-zh", _MAN / "zh_CN", ("man1", "man2", "man5", "man7", "man8")),
    ),
)
