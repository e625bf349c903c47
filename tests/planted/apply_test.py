"""Tests apply.py: what it accepts, and that it names the entry that it refuses."""
import unittest

from apply import TableError, plant, read_table

FILE = "fn f() {\n    a();\n    b();\n    a();\n    c();\n}\n"
ONE = "## one: a b too few, found by simulation\nf.rs\n"
SKIP_B = ONE + '-    b();\n+    if !crate::planted::is("one") {\n+        b();\n+    }\n'
TWO = '## two: c twice, found by daemon twice\nf.rs\n     a();\n     c();\n+    if is::planted::is("two") { c(); }\n'

REFUSED = [
    ("found twice", ONE + '-    a();\n+    planted::is("one");', "one: f.rs: 2 times"),
    ("not found", ONE + '-    x();\n+    planted::is("one");', "one: f.rs: 0 times"),
    ("only new lines", ONE + '+    planted::is("one");', "one: f.rs: no old line"),
    ("no file", ONE.replace("f.rs", "g.rs") + '-    b();\n+    planted::is("one");', "one: g.rs: "),
    ("no path", ONE.replace("f.rs\n", "") + "-    b();", "one: line 2: no path"),
    ("no switch", ONE + "-    b();", 'one: no new line has `planted::is("one")`'),
    ("a switch of no entry", ONE + '-    b();\n+    planted::is("other");', "one: the switch other has no entry"),
    ("a malformed heading", "## one\n", "line 1: not "),
    ("two of a name", SKIP_B + SKIP_B, "one: there are two entries"),
    ("one line changed by two", SKIP_B + SKIP_B.replace("one", "two"), "one and two: both change f.rs:3"),
]


def read(path):
    if path == "f.rs":
        return FILE
    raise FileNotFoundError(2, "no such file")


class ApplyTest(unittest.TestCase):
    def test_plants_all_bugs_of_a_table(self):
        bugs = read_table(f"# A comment.\n\n{SKIP_B}\n{TWO}".splitlines())
        self.assertEqual([(bug.name, bug.suite) for bug in bugs], [("one", "simulation"), ("two", "daemon twice")])
        expected = FILE.replace("    b();\n", '    if !crate::planted::is("one") {\n        b();\n    }\n')
        expected = expected.replace("    c();\n}", '    c();\n    if is::planted::is("two") { c(); }\n}')
        self.assertEqual(plant(bugs, read), {"f.rs": expected})

    def test_names_the_entry_that_is_wrong(self):
        for name, table, error in REFUSED:
            with self.subTest(name), self.assertRaises(TableError) as caught:
                plant(read_table(table.splitlines()), read)
            self.assertIn(error, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
