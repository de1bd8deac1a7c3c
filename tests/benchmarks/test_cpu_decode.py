"""The page of translation on a CPU: its tables are replaced, and nothing else of it."""

from benchmarks.cpu_decode import TABLES, markdown, write_page


def row(rate, megabytes):
    return {"rates": {"1": {"wall": rate, "processor": 2 * rate}}, "megabytes": megabytes}


def test_the_tables_of_a_page_are_replaced(tmp_path):
    found = {
        "CTranslate2 float32": row(100.0, 700),
        "gshard float32": row(150.0, 600),
        "gshard 32 experts float32": row(75.0, 900),
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{TABLES[0]}\n\nan older table\n\n{TABLES[1]}\n\nafter\n")
    for _ in range(2):
        write_page(page, [markdown(1, found, [1])], TABLES)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "an older table" not in lines
    assert lines.count("| CTranslate2 float32 | 100 (200) |  |  | 700 MB |") == 1
    assert "| gshard float32 | 150 (300) | 1.50 (1.50) |  | 600 MB |" in lines
    assert "| gshard 32 experts float32 | 75 (150) | 0.75 (0.75) | 0.50 (0.50) | 900 MB |" in lines
