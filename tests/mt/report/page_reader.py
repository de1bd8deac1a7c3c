"""A report page read without a browser, and the files it was made from."""

import html.parser
import json


class Page(html.parser.HTMLParser):
    """A page read without a browser: its tags, its tables by id, its text and its numbers."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.tags, self.tables, self.text, self.scripts = [], {}, "", []
        self.cell = self.table = None
        self.feed(path.read_text(encoding="utf-8"))
        self.numbers = json.loads(next(t for a, t in self.scripts if a.get("id") == "numbers"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag == "table":
            self.table = self.tables.setdefault(found["id"], [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.cell = {"text": "", "value": found.get("data-value")}
            self.table[-1].append(self.cell)
        elif tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None
        elif tag == "table":
            self.table = None

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.scripts[-1][1] == "":
            self.scripts[-1] = (self.scripts[-1][0], data)
            return
        self.text += data
        if self.cell is not None:
            self.cell["text"] += data

    def column(self, table, title):
        """{first cell: exact value} of a column; None where there is none."""
        heads = [cell["text"] for cell in self.tables[table][0]]
        place = heads.index(title)
        found = {}
        for row in self.tables[table][1:]:
            value = row[place]["value"]
            found[row[0]["value"]] = float(value) if value not in (None, "") else None
        return found


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def lines(folder, kind):
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            found.append(record)
    return found
