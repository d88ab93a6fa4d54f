"""The texts in Simplified Chinese: no translation is wrong, and those that are still wanted are named.

A text may come without its translation: whoever adds it need not know Chinese. A release has them all.
"""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone, translation
from django.utils.translation.template import templatize

import django_delayq
from django_delayq.api.pausing import pause_queue
from django_delayq.console.admin.site import PAGES
from django_delayq.console.models import Rollup

from . import asking, samples

QUEUE = Path(django_delayq.__file__).parent
CONSOLE = QUEUE / "console"
RECURRING = QUEUE / "recurring"

Key = tuple[str | None, str]

_HAN = re.compile(r"[\u4e00-\u9fff]")
_PLACEHOLDER = re.compile(r"%\(\w+\)[a-z]|%%")
_SENTENCE = re.compile(r"[A-Za-z]+(?:[ ,]+[a-z]{2,}){3,}")

# --- the catalogs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One text of a .po file. ``plural`` is empty when there is none."""

    key: Key
    plural: str
    texts: tuple[str, ...]
    fuzzy: bool

    @property
    def is_translated(self) -> bool:
        return not self.fuzzy and all(self.texts)


def entries(content: str) -> list[Entry]:
    found = []
    for block in re.split(r"\n{2,}", content.strip()):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            word, quote, rest = line.partition('"')
            name = word.strip() or name
            fields[name] = fields.get(name, "") + ast.literal_eval(quote + rest)
        if fields.get("msgid"):
            texts = tuple(text for name, text in sorted(fields.items()) if name.startswith("msgstr"))
            fuzzy = re.search(r"^#,.*fuzzy", block, re.MULTILINE) is not None
            found.append(Entry((fields.get("msgctxt"), fields["msgid"]), fields.get("msgid_plural", ""), texts, fuzzy))
    return found


def catalog(app: Path, suffix: str) -> Path:
    return app / f"locale/zh_Hans/LC_MESSAGES/django.{suffix}"


# By app: each has a catalog of its own.
CATALOGS = {app: entries(catalog(app, "po").read_text(encoding="utf-8")) for app in (QUEUE, CONSOLE, RECURRING)}
ENTRIES = [entry for found in CATALOGS.values() for entry in found if entry.is_translated]

each_app = pytest.mark.parametrize("app", CATALOGS, ids=lambda app: app.name)


@each_app
def test_every_text_is_there_once(app: Path) -> None:
    found = CATALOGS[app]
    assert len(found) > {QUEUE: 40, CONSOLE: 400, RECURRING: 40}[app]
    assert [entry for entry in found if len(entry.texts) != 1] == []
    assert len({entry.key for entry in found}) == len(found)


def test_a_text_of_several_apps_has_one_translation() -> None:
    translations: dict[Key, set[tuple[str, ...]]] = {}
    for entry in ENTRIES:
        translations.setdefault(entry.key, set()).add(entry.texts)
    assert {key: texts for key, texts in translations.items() if len(texts) > 1} == {}


def test_every_sentence_is_chinese() -> None:
    with_words = [entry for entry in ENTRIES if re.search(r"\w", _PLACEHOLDER.sub("", entry.key[1]))]
    sentences = [entry for entry in with_words if " " in entry.key[1] and entry.key[0] != "date format"]
    assert [entry for entry in sentences if not _HAN.search(entry.texts[0])] == []


def test_translations_keep_the_placeholders() -> None:
    def holes(text: str) -> list[str]:
        return sorted(_PLACEHOLDER.findall(text))

    assert [e for e in ENTRIES if holes(e.texts[0]) != holes(e.plural or e.key[1])] == []


@each_app
def test_the_compiled_texts_are_those_of_the_source(app: Path) -> None:
    with catalog(app, "mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    known: dict[Any, str] = dict(compiled._catalog)  # type: ignore[attr-defined]
    known.pop("")
    expected = {}
    for entry in filter(lambda entry: entry.is_translated, CATALOGS[app]):
        context, text = entry.key
        name = text if context is None else f"{context}\x04{text}"
        expected[(name, 0) if entry.plural else name] = entry.texts[0]
    assert known == expected


# --- the sources ------------------------------------------------------------------------------------------------------

# For each function, whether it takes a context and whether it takes a plural.
_FUNCTIONS = {
    "gettext": (False, False),
    "ngettext": (False, True),
    "pgettext": (True, False),
    "npgettext": (True, True),
}
_CALL = re.compile(r"""\b(_|n?p?gettext)\(((?:u?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(?:,\s*)?)+)""")


def marked_in_python(source: str) -> Iterator[tuple[Key, str]]:
    """Yield each call of a function of gettext, by whatever name it was imported, within f-strings too.

    What is given by the name of a constant is a text of Django's own.
    """
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: alias.name.removesuffix("_lazy")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "django.utils.translation"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        function = names.get(node.func.id, "")
        if function in _FUNCTIONS and not isinstance(node.args[0], ast.Name):
            number = 1 + sum(_FUNCTIONS[function])
            yield marked(function, [ast.literal_eval(argument) for argument in node.args[:number]])


def marked_in_template(source: str) -> Iterator[tuple[Key, str]]:
    for function, arguments in _CALL.findall(templatize(source)):
        yield marked("gettext" if function == "_" else function, list(ast.literal_eval(f"[{arguments}]")))


def marked(function: str, texts: list[str]) -> tuple[Key, str]:
    has_context, has_plural = _FUNCTIONS[function]
    context = texts.pop(0) if has_context else None
    return (context, texts[0]), texts[1] if has_plural else ""


def all_marked(app: Path) -> Iterator[tuple[Key, str]]:
    others = (CONSOLE, RECURRING) if app == QUEUE else ()
    for path in sorted(app.rglob("*.py")):
        if not any(path.is_relative_to(other) for other in others):
            source = path.read_text(encoding="utf-8")
            # Most of the queue has no texts, and takes seconds to parse.
            yield from marked_in_python(source) if "gettext" in source else ()
    for path in sorted(app.rglob("templates/**/*.html")):
        if not any(path.is_relative_to(other) for other in others):
            yield from marked_in_template(path.read_text(encoding="utf-8"))


@cache
def texts_of(app: Path) -> dict[Key, str]:
    """Return the texts that the sources of an app mark, with their plurals."""
    found: dict[Key, str] = {}
    for key, plural in all_marked(app):
        found[key] = found.get(key) or plural
    return found


def wanting(texts: dict[Key, str], catalogue: list[Entry]) -> list[str]:
    """Return the texts that have no translation."""
    there = {entry.key for entry in catalogue if entry.is_translated}
    return [text for context, text in texts if (context, text) not in there]


@each_app
def test_the_catalog_has_nothing_but_what_the_sources_mark(app: Path) -> None:
    """When it fails: run makemessages in the folder of the app, and compilemessages.

    python -m django makemessages -l zh_Hans --no-location --no-wrap --no-obsolete
    (in the queue: --ignore for the folders of the other apps)
    """
    found = texts_of(app)
    assert {entry.key: entry.plural for entry in CATALOGS[app] if found.get(entry.key) != entry.plural} == {}


@each_app
def test_texts_that_want_a_translation_are_named(app: Path) -> None:
    """It is skipped, with their names, while there are some: a change may come without them, and a release may not."""
    if names := wanting(texts_of(app), CATALOGS[app]):
        where = catalog(app, "po").relative_to(QUEUE.parent)
        pytest.skip(f"{where} wants the translation of: {', '.join(map(repr, names))}")


def test_a_text_wants_a_translation_that_is_missing_empty_or_a_guess() -> None:
    texts: dict[Key, str] = {(None, text): "" for text in ("Age", "Host", "Name", "Pid")}
    po = 'msgid "Host"\nmsgstr ""\n\nmsgid "Name"\nmsgstr "名称"\n\n#, fuzzy\nmsgid "Pid"\nmsgstr "名称"\n'
    assert wanting(texts, entries(po)) == ["Age", "Host", "Pid"]


TEMPLATES = sorted((CONSOLE / "templates").rglob("*.html"))
assert TEMPLATES


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_has_words_that_are_not_marked(path: Path) -> None:
    source = re.sub(r"{% (?:blocktranslate|comment).*?{% end(?:blocktranslate|comment) %}", "", path.read_text())
    source = re.sub(r"<pre>.*?</pre>|{% block bodyclass %}[^\n]*", "", source, flags=re.DOTALL)
    plain = re.sub(r"{%.*?%}|{{.*?}}|{#.*?#}", "", source)
    text = re.sub(r"<[^>]*>", " ", plain)
    assert re.findall(r"[A-Za-z]{2,}", text) == []
    assert re.findall(r'(?:title|alt|placeholder|aria-label)="[^"]*[A-Za-z]{2,}', plain) == []


# --- the pages --------------------------------------------------------------------------------------------------------

CHINESE = {"accept-language": "zh-hans,zh;q=0.9,en;q=0.5"}


def page(model: str, name: str = "changelist", *args: object) -> str:
    return samples.admin_url(f"{model}_{name}", *args)


def main(response: Any) -> str:
    """Return the text of our part of the page."""
    assert response.status_code == 200
    html = response.content.decode()
    links, content = html.index('<nav class="dq-nav"'), html.index('<div id="content"')
    html = html[links : html.index("</nav>", links)] + html[content:].partition("<footer")[0]
    html = re.sub(r"<(pre|script|code)\b.*?</\1>", " ", html, flags=re.DOTALL)
    html += " ".join(re.findall(r'(?:title|alt|placeholder|aria-label)="([^"]*)"', html))
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "  ", html))


_TEXTS = [entry.key[1] for entry in ENTRIES]
OURS = {text for text in _TEXTS if text.strip().count(" ") > 1 and not _PLACEHOLDER.search(text)}


def translated(text: str) -> str:
    """Return a text without what stays English because it has no translation yet."""
    for app, catalogue in CATALOGS.items():
        for english in wanting(texts_of(app), catalogue):
            pattern = ".*?".join(map(re.escape, re.split(r"%\(\w+\)[a-z]", english)))
            text = re.sub(pattern, " ", text)
    return text


def speaks_chinese(response: Any, *words: str) -> None:
    text = main(response)
    for word in words:
        assert word in text
    assert _HAN.search(text)
    assert [sentence for sentence in OURS if sentence in text] == []


def test_every_page_speaks_chinese(boss: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"mails": {"limit": 1}}}
    every = samples.one_of_each()
    samples.worker("w1")
    pause_queue("mails", reason="provider is down", duration="1h")
    operation = samples.operation()
    Rollup.objects.create(at=timezone.now(), queue="mails", topic="t.a", consumed=1)
    words = {
        "dashboard": ("件事需要您处理", "已调度", "将到期", "过去一小时与未来一小时", "延误"),
        "message": ("延迟消息", "搜索", "活动中", "一个键，若无此键则为主题"),
        "deadletters": ("失败", "按主题", "按错误类型", "重新入队"),
        "queue": ("已暂停", "下次到期", "暂停…"),
        "topics": ("最繁忙", "哪些变慢了", "灰色：此前一小时", "运行时间 p95"),
        "limits": ("限制", "使用情况", "等待中"),
        "worker": ("存活", "最近心跳"),
        "health": ("数据库记录与 Redis 的一致性", "立即检查"),
        "operation": ("进度", "排队中", "发起者"),
        "auditevent": ("操作者", "对象", "时段"),
    }
    assert {model._meta.model_name for model in PAGES} == set(words)
    for model, expected in words.items():
        speaks_chinese(boss.get(page(model), headers=CHINESE), *expected)
    for message in every.values():
        speaks_chinese(boss.get(samples.change_url(message), headers=CHINESE), "时间线", "数据库记录")
    speaks_chinese(boss.get(page("operation", "change", operation.pk), headers=CHINESE), "进度", "排队中")
    speaks_chinese(boss.get(page("worker", "change", "w1"), headers=CHINESE), "工作进程")
    speaks_chinese(boss.get(page("queue", "detail", "mails"), headers=CHINESE), "队列 mails", "处理器的运行时间")
    speaks_chinese(boss.get(page("queue", "pause", "mails"), headers=CHINESE), "暂停队列 mails？", "或直到")
    speaks_chinese(boss.get(page("queue", "resume", "mails"), headers=CHINESE), "让队列 mails 继续？")
    speaks_chinese(boss.get(page("health", "restore"), headers=CHINESE), "从数据库记录恢复 Redis", "预览")


@pytest.mark.django_db
def test_the_dashboard_has_no_english_sentence(boss: Client) -> None:
    samples.one_of_each()
    pause_queue("mails")
    text = main(boss.get(page("dashboard"), headers=CHINESE))
    assert _SENTENCE.findall(translated(text)) == []
    # The page for a browser that asks for English shows that the search finds sentences.
    english = main(boss.get(page("dashboard"), headers={"accept-language": "en"}))
    assert _SENTENCE.findall(english)
    assert not _HAN.search(english)


@pytest.mark.parametrize("action", asking.ACTIONS)
def test_every_question_and_its_answer_are_chinese(boss: Client, action: str) -> None:
    every = samples.one_of_each()
    with translation.override("zh-hans"):
        boss.defaults["HTTP_ACCEPT_LANGUAGE"] = "zh-hans"
        asked = asking.select(boss, action, *every.values())
        speaks_chinese(asked, "不，返回", "原因")
        [said] = samples.said(asking.answer(boss, action, asked, **asking.GIVEN.get(action, {})))
    assert re.search(r"6 条消息：\d+ 条", said)
    assert not re.search(r"[a-z]{3}", translated(said))


@pytest.mark.django_db
def test_searches_and_their_problems_are_chinese(boss: Client) -> None:
    samples.scheduled(key="k1")
    found = boss.get(page("message"), {"q": "key:k1 due:<2h attempts:<3"}, headers=CHINESE)
    speaks_chinese(found, "键为“k1”", "早于")
    speaks_chinese(boss.get(page("message"), {"q": "is:nonsense"}, headers=CHINESE), "无法识别")
