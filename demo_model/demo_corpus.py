"""Prose and small conversations from Debian's documentation packages.

    apt-get install python3.11-doc postgresql-doc-15

From HTML by Sphinx and DocBook, sentences stay; code, tables, signatures and navigation go. Conversations ask with a
page's headings and terms, and answer with the sentences after them.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["heading", "term", "paragraph"]
Message = dict[str, str]

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
SKIPPED_TAGS = {"head", "nav", "pre", "script", "style", "table", "sup", "footer", "form"}
SKIPPED_CLASS = re.compile(
    r"headerlink|navheader|navfooter|toc|toctree-wrapper|related|sphinxsidebar|footnotes?|footer|mobile-nav|"
    r"version(?:added|changed|modified)|synopsis|refsynopsisdiv|programlisting"
)
KINDS: dict[str, Kind] = {**{f"h{level}": "heading" for level in range(1, 7)}, "dt": "term", "p": "paragraph"}
PLAIN = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{NO-BREAK SPACE}": " ",
        "\N{SOFT HYPHEN}": "",
        "\N{PILCROW SIGN}": "",
    }
)

SECTION_NUMBER = re.compile(r"^(?:Chapter |Appendix |Part )?(?:\d+|[A-Z]+)(?:\.\d+)*\.\s+")
SENTENCE_END = re.compile(r"[.!?][\"')]*(?=\s|$)")
NOT_PROSE = re.compile(r"^(?:Source code:|Availability:|Release:|Date:|Author:|Editor:|See also)")
PAGES_WITHOUT_PROSE = re.compile(
    r"^(?:genindex|py-modindex|search|contents|bookindex|biblio|release|features|acronyms|docguide)|changelog"
)
GENERIC_HEADING = re.compile(
    r"Introduction|Overview|Description|Notes|Parameters|Examples?|Usage|Options|Outputs|Summary|General|"
    r"Compatibility|Return Value|Arguments|Details|Remarks|Features|Functions|Concepts|Background|Limitations|"
    r"History|Rationale|Security|References|Implementation|Methods|Constants|Exceptions|Objects"
)
ADMONITION = re.compile(r"Note|Tip|Caution|Warning|Important|See Also|Authors?|Footnotes")
MIN_WORDS = 8
MIN_NAME_LETTERS = 3
TERM_SHARE = 0.3  # of terms in conversations; all would be a third of the text
MAX_ANSWER_WORDS = 110

HEADING_QUESTIONS = (
    "What is {}?",
    "Tell me about {}.",
    "Explain {}.",
    "Can you explain {}?",
    "What should I know about {}?",
    "How does {} work?",
)
TERM_QUESTIONS = ("What is {}?", "What does {} do?", "What is {} for?", "Tell me about {}.", "Explain {}.")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python and PostgreSQL.",
    "Answer briefly.",
)
SMALL_TALK = (
    ("Hello", "Hello! Ask me something about Python or PostgreSQL."),
    ("Hello!", "Hello! Ask me something about Python or PostgreSQL."),
    ("Hi", "Hi! What would you like to know about Python or PostgreSQL?"),
    ("Hi there!", "Hi! What would you like to know about Python or PostgreSQL?"),
    ("Good morning", "Good morning! Ask me something about Python or PostgreSQL."),
    ("How are you?", "I am well, thank you. Ask me something about Python or PostgreSQL."),
    ("Who are you?", "I am a very small language model that has read the Python and PostgreSQL documentation."),
    ("What are you?", "I am a very small language model that has read the Python and PostgreSQL documentation."),
    ("What is your name?", "I am the demo model of Tidewheel, a very small language model."),
    ("What can you do?", "I can write about Python and PostgreSQL. I am small, so please do not rely on what I say."),
    ("Can you help me?", "I can try. I have read the documentation of Python and PostgreSQL."),
    ("What is Tidewheel?", "Tidewheel is a backend for Triton Inference Server that serves large language models."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
)


class MissingCorpusError(RuntimeError):
    pass


@dataclass(frozen=True)
class Source:
    package: str
    folder: Path

    def pages(self) -> list[Path]:
        found = sorted(self.folder.rglob("*.html")) if self.folder.is_dir() else []
        if not found:
            raise MissingCorpusError(f"no pages under {self.folder}: run `apt-get install {self.package}`")
        return [page for page in found if not PAGES_WITHOUT_PROSE.search(page.name)]


SOURCES = (
    Source("python3.11-doc", Path("/usr/share/doc/python3.11/html")),
    Source("postgresql-doc-15", Path("/usr/share/doc/postgresql-doc-15/html")),
)


class Block(NamedTuple):
    kind: Kind
    text: str


class Topic(NamedTuple):
    kind: Kind
    name: str
    answer: str


class PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._open_tag: str | None = None
        self._text: list[str] = []
        self._skip_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag in VOID:
            self._text.append(" ")
        elif self._skip_depth or tag in SKIPPED_TAGS or any(map(SKIPPED_CLASS.fullmatch, classes)):
            self._skip_depth += 1
        elif tag in KINDS:
            self._close_block()
            self._open_tag = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if self._skip_depth:
            self._skip_depth -= 1
        elif tag == self._open_tag:
            self._close_block()

    def handle_data(self, data: str) -> None:
        if self._open_tag and not self._skip_depth:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._close_block()

    def _close_block(self) -> None:
        text = " ".join("".join(self._text).translate(PLAIN).split())
        if self._open_tag and text:
            self.blocks.append(Block(KINDS[self._open_tag], text))
        self._open_tag, self._text = None, []


def sentences(paragraph: str) -> str:
    """Return the paragraph up to its last full sentence, "" if that is no prose.

    A last sentence that introduces code ("… like this:") is dropped.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(paragraph)]
    text = paragraph[: ends[-1]] if ends else ""
    letters = sum(char.isalpha() or char.isspace() for char in text)
    is_prose = len(text.split()) >= MIN_WORDS and letters > 0.85 * len(text) and not NOT_PROSE.match(text)
    return text if is_prose else ""


def term_name(text: str) -> str:
    """Return the bare name: `class queue.Queue(maxsize=0)` becomes `queue.Queue`."""
    name = re.split(r"\(| = |:| ¶", text)[0].strip()
    words = name.split()
    looks_like_code = len(words) > 1 and re.search(r"[._*]", words[-1]) is not None
    return words[-1].lstrip("*") if looks_like_code else name


def clean_block(block: Block) -> Block:
    if block.kind == "paragraph":
        return Block(block.kind, sentences(block.text))
    if block.kind == "term":
        return Block(block.kind, term_name(block.text))
    heading = SECTION_NUMBER.sub("", block.text).split(" — ")[0].strip()
    return Block(block.kind, "" if ADMONITION.fullmatch(heading) else heading)


@dataclass(frozen=True)
class Document:
    name: str
    blocks: tuple[Block, ...]

    @property
    def paragraphs(self) -> list[str]:
        return [block.text for block in self.blocks if block.kind == "paragraph"]

    @property
    def prose(self) -> str:
        return "\n\n".join(self.paragraphs)

    def topics(self) -> Iterator[Topic]:
        title = next((block.text for block in self.blocks if block.kind == "heading"), "")
        for index, block in enumerate(self.blocks):
            following = takewhile(lambda item: item.kind == "paragraph", self.blocks[index + 1 :])
            answer = shortened([item.text for item in following])
            name = title if GENERIC_HEADING.fullmatch(block.text) else block.text
            if block.kind != "paragraph" and answer and is_topic(name):
                yield Topic(block.kind, name, answer)


def is_topic(name: str) -> bool:
    return len(name) >= MIN_NAME_LETTERS and len(name.split()) <= 8 and not GENERIC_HEADING.fullmatch(name)


def shortened(paragraphs: list[str]) -> str:
    """Return leading paragraphs up to `MAX_ANSWER_WORDS` words; cut a longer first one at a sentence."""
    chosen: list[str] = []
    for paragraph in paragraphs[:3]:
        if len(" ".join([*chosen, paragraph]).split()) > MAX_ANSWER_WORDS:
            break
        chosen.append(paragraph)
    if not chosen and paragraphs:
        head = " ".join(paragraphs[0].split()[:MAX_ANSWER_WORDS])
        chosen = [sentences(head)]
    return "\n\n".join(chosen)


def clean_page(name: str, html: str) -> Document:
    parser = PageParser()
    parser.feed(html)
    parser.close()
    blocks = (clean_block(block) for block in parser.blocks)
    return Document(name, tuple(block for block in blocks if block.text))


def without_repeats(documents: Iterable[Document]) -> Iterator[Document]:
    """Drop repeated paragraphs (boilerplate), and documents with hardly any prose."""
    seen: set[str] = set()
    for document in documents:
        fresh = [block for block in document.blocks if block.kind != "paragraph" or block.text not in seen]
        kept = Document(document.name, tuple(fresh))
        seen.update(kept.paragraphs)
        if len(kept.prose.split()) >= 3 * MIN_WORDS:
            yield kept


def load_documents(sources: Iterable[Source] = SOURCES, every: int = 1) -> list[Document]:
    """Read all pages, or one in `every`; raise `MissingCorpusError` without a package."""
    pages = [(source, page) for source in sources for page in source.pages()][::every]
    return list(
        without_repeats(
            clean_page(f"{source.package}/{page.relative_to(source.folder)}", page.read_text(errors="replace"))
            for source, page in pages
        )
    )


def is_validation(document: Document) -> bool:
    """Select one page in twenty by a hash of its name."""
    return zlib.crc32(document.name.encode()) % 20 == 0


def everyday_case(heading: str) -> str:
    """Lower the case, except of names and acronyms."""
    return " ".join(word.lower() if word.istitle() and word != "Python" else word for word in heading.split())


def question(topic: Topic, rng: random.Random) -> str:
    forms = HEADING_QUESTIONS if topic.kind == "heading" else TERM_QUESTIONS
    name = everyday_case(topic.name) if rng.random() < 0.7 else topic.name
    text = rng.choice(forms).format(name)
    return text[0].lower() + text[1:].rstrip("?.") if rng.random() < 0.15 else text


def conversations(document: Document, rng: random.Random) -> Iterator[list[Message]]:
    """Make conversations of one to three turns, one in eight with a system prompt."""
    topics = [topic for topic in document.topics() if topic.kind == "heading" or rng.random() < TERM_SHARE]
    rng.shuffle(topics)
    while topics:
        turns = [topics.pop() for _ in range(min(len(topics), rng.choice((1, 1, 2, 3))))]
        messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.125 else []
        for topic in turns:
            messages.append({"role": "user", "content": question(topic, rng)})
            messages.append({"role": "assistant", "content": topic.answer})
        yield messages


def small_talk() -> Iterator[list[Message]]:
    for said, answer in SMALL_TALK:
        yield [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
