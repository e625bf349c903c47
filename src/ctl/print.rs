//! What the tool prints: tables, JSON, escaped bodies, times. It must not know a server.

use super::conn::Fields;
use super::{Result, print_with};
use crate::engine::text::{JsonText, Span, is_unprintable};
use rustix::termios::tcgetwinsize;
use std::io::{self, Write};

/// Rows that are printed as a table or as lines of JSON, in parts: the header once, and columns that get wider
/// only.
pub struct Listing {
    is_json: bool,
    columns: Vec<Column>,
    widths: Vec<usize>,
    /// The cells of each row; in JSON the row is one cell.
    rows: Vec<Vec<String>>,
    width: usize,
}

/// A column of a table: its key, its kind and its title. The kinds are `>` aligned to the right, `:` a time in
/// seconds, `<` aligned to the left, `~` a name that is cut in its middle, and `.` text that is cut at its end.
type Column = (String, char, String);

/// The kinds of columns.
const KINDS: [char; 5] = ['>', ':', '<', '~', '.'];

/// The width where there is no terminal.
const WIDTH: usize = 80;

/// The width to which a name or a text is cut at most.
const NAME_MIN: usize = 8;

/// The width to which the name of a tube is cut in a text.
pub const NAME_LEN: usize = 20;

/// The rows that are printed together, with one width of each column.
const ROWS_MAX: usize = 1000;

impl Listing {
    /// Returns an empty listing of columns such as `ready>READY`.
    pub fn new(is_json: bool, columns: &str) -> Listing {
        let column = |text: &str| {
            let (key, title) = text.split_once(KINDS).expect("each column has a kind");
            (key.to_owned(), text.as_bytes()[key.len()].into(), title.to_owned())
        };
        let columns = columns.split_whitespace().map(column).collect();
        let width = terminal_size().map_or(WIDTH, |(width, _)| width);
        Listing { is_json, columns, widths: Vec::new(), rows: Vec::new(), width }
    }

    /// Adds a row. `texts` are what the table has for some keys, in place of the value in the row. Many rows are
    /// printed at once.
    pub fn add(&mut self, row: &Fields, texts: &[(&str, String)]) -> Result {
        let cell = |(key, kind, _): &Column| match texts.iter().find(|(own, _)| own == key) {
            Some((_, text)) => text.clone(),
            None if *kind == ':' => Span(row.number(key)).to_string(),
            None => row.text(key).to_owned(),
        };
        if self.is_json {
            self.rows.push(vec![row.to_string()]);
        } else {
            if self.widths.is_empty() {
                self.push(self.columns.iter().map(|column| column.2.clone()).collect());
            }
            self.push(self.columns.iter().map(cell).collect());
        }
        if self.rows.len() >= ROWS_MAX { self.print() } else { Ok(()) }
    }

    fn push(&mut self, row: Vec<String>) {
        self.widths.resize(row.len(), 0);
        for (width, cell) in self.widths.iter_mut().zip(&row) {
            *width = (*width).max(width_of(cell));
        }
        self.rows.push(row);
    }

    /// Prints the rows that were added since. Without rows nothing is printed, not even the header.
    pub fn print(&mut self) -> Result {
        print_with(|out| self.write(out))
    }

    fn write(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let rows = std::mem::take(&mut self.rows);
        if self.is_json {
            return rows.iter().try_for_each(|row| writeln!(out, "{}", row[0]));
        }
        let (gap, widths) = self.fitted();
        for row in rows {
            let cells = row.iter().zip(&self.columns).zip(&widths);
            let cells = cells.map(|((text, (_, kind, _)), width)| {
                let text = cut(text, *width, *kind == '~');
                let padding = " ".repeat(width - width_of(&text));
                if ['>', ':'].contains(kind) { padding + &text } else { text + &padding }
            });
            let line = cells.collect::<Vec<_>>().join(&" ".repeat(gap));
            writeln!(out, "{}", cut(line.trim_end(), self.width, false))?;
        }
        Ok(())
    }

    /// Returns the spaces between columns, and the widths at which the table fits, unless its numbers are too wide.
    fn fitted(&self) -> (usize, Vec<usize>) {
        let mut widths = self.widths.clone();
        let total = |widths: &[usize], gap| widths.iter().map(|width| width + gap).sum::<usize>();
        let gap = if total(&widths, 2) > self.width + 2 { 1 } else { 2 };
        while total(&widths, gap) > self.width + gap {
            let can_shrink = |(width, column): &(&mut usize, &Column)| {
                ['~', '.'].contains(&column.1) && **width > NAME_MIN
            };
            let columns = widths.iter_mut().zip(&self.columns).filter(can_shrink);
            let Some((widest, _)) = columns.max_by_key(|(width, _)| **width) else { break };
            *widest -= 1;
        }
        (gap, widths)
    }
}

/// Returns columns and rows of the terminal that stdout is.
pub fn terminal_size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some((size.ws_col.into(), size.ws_row.into()))
}

/// Returns the columns that a terminal needs. Wide characters take two.
fn width_of(text: &str) -> usize {
    text.chars().map(columns_of).sum()
}

fn columns_of(char: char) -> usize {
    if char < '\u{1100}' || char == '…' { 1 } else { 2 }
}

/// Cuts `text` to `width` columns, in its middle or at its end.
pub fn cut(text: &str, width: usize, in_middle: bool) -> String {
    let (mut chars, mut columns): (Vec<char>, _) = (text.chars().collect(), width_of(text));
    if columns <= width {
        return text.to_owned();
    }
    loop {
        let at = if in_middle { chars.len() / 2 } else { chars.len() - 1 };
        columns -= columns_of(chars.remove(at));
        if columns < width {
            chars.insert(at, '…');
            return chars.into_iter().collect();
        }
    }
}

/// Returns a body as text that no terminal interprets: `\n`, `\\`, and other bytes as `\x1b`.
pub fn escaped(body: &[u8]) -> String {
    let mut text = String::with_capacity(body.len());
    for chunk in body.utf8_chunks() {
        for char in chunk.valid().chars() {
            if char == '\\' || is_unprintable(char) {
                text += &char.to_string().as_bytes().escape_ascii().to_string();
            } else {
                text.push(char);
            }
        }
        text += &chunk.invalid().escape_ascii().to_string();
    }
    text
}

/// Returns `text` as a string of JSON.
pub fn json_string(text: &str) -> String {
    format!("\"{}\"", JsonText(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::text::Grouped;

    #[test]
    fn tables_fit_and_names_are_cut_in_the_middle() {
        let mut table = Listing::new(false, "tube~TUBE ready>READY");
        table.width = 80;
        let mut out = Vec::new();
        table.write(&mut out).unwrap();
        assert!(out.is_empty());
        let name = format!("a{}z", "-".repeat(198));
        for (name, ready) in [(&*name, 7), ("b", 12)] {
            let row = Fields::of([("tube", json_string(name)), ("ready", ready.to_string())]);
            table.add(&row, &[]).unwrap();
        }
        table.write(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.chars().count() == 80), "{text}");
        assert!(lines[1].starts_with("a---") && lines[1].ends_with("z     7"), "{}", lines[1]);
        assert!(lines[1].contains('…'));
        // Columns of numbers are not cut, but a line is.
        table.add(&Fields::of([("ready", "123456789".into())]), &[]).unwrap();
        (table.width, out) = (12, Vec::new());
        table.write(&mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "         12…\n");
        assert_eq!(cut("ab漢字cd", 5, false), "ab漢…");
        assert_eq!(cut("abcdefgh", 5, true), "ab…gh");
        assert_eq!(cut("abcdefgh", 6, true), "abc…gh");
        // A client can hold many jobs.
        assert_eq!(cut(&"job 1, ".repeat(200_000), 7, false), "job 1,…");
    }

    #[test]
    fn bodies_are_escaped() {
        let cases: [(&[u8], &str); 5] = [
            (b"plain", "plain"),
            ("ä€".as_bytes(), "ä€"),
            (b"\x1b[31m\0\n\\", "\\x1b[31m\\x00\\n\\\\"),
            (b"a\xff\xfe", "a\\xff\\xfe"),
            ("\u{9b}\u{202e}".as_bytes(), "\\xc2\\x9b\\xe2\\x80\\xae"),
        ];
        for (body, text) in cases {
            assert_eq!(escaped(body), text);
        }
    }

    #[test]
    fn numbers_and_times_are_for_people() {
        let numbers = [(0, "0"), (999, "999"), (3120, "3,120"), (1_002_003, "1,002,003")];
        assert!(numbers.into_iter().all(|(number, text)| Grouped(number).to_string() == text));
        let spans = [(0, "0s"), (119, "119s"), (1200, "20m"), (7200, "2h"), (172_800, "2d")];
        assert!(spans.into_iter().all(|(secs, text)| Span(secs).to_string() == text));
    }
}
