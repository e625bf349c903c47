//! What the tool prints: tables, JSON, escaped bodies, times. It must not know a server.

use super::conn::Fields;
use super::print_with;
use crate::engine::text::{JsonText, is_unprintable, largest_unit};
use crate::os::failure::Failure;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
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
    is_begun: bool,
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

/// The rows that are printed together, with one width of each column.
const ROWS_MAX: usize = 1000;

impl Listing {
    /// Returns an empty listing of columns such as `ready>READY`.
    pub fn new(is_json: bool, columns: &str) -> Listing {
        let column = |text: &str| {
            let (key, title) = text.split_once(KINDS).expect("each column has a kind");
            (key.to_owned(), text.as_bytes()[key.len()].into(), title.to_owned())
        };
        let columns: Vec<Column> = columns.split_whitespace().map(column).collect();
        let width = terminal_size().map_or(WIDTH, |(width, _)| width);
        let widths = vec![0; columns.len()];
        Listing { is_json, columns, widths, rows: Vec::new(), width, is_begun: false }
    }

    /// Adds a row. `texts` are what the table has for some keys, in place of the value in the row. Many rows are
    /// printed at once.
    pub fn add(&mut self, row: &Fields, texts: &[(&str, String)]) -> Result<(), Failure> {
        let cell = |(key, kind, _): &Column| match texts.iter().find(|(own, _)| own == key) {
            Some((_, text)) => text.clone(),
            None if *kind == ':' => span(row.number(key)),
            None => row.text(key).to_owned(),
        };
        self.rows.push(match self.is_json {
            true => vec![row.to_string()],
            false => self.columns.iter().map(cell).collect(),
        });
        if self.rows.len() >= ROWS_MAX { self.print() } else { Ok(()) }
    }

    /// Prints the rows that were added since. Without rows nothing is printed, not even the header.
    pub fn print(&mut self) -> Result<(), Failure> {
        print_with(|out| self.write(out))
    }

    fn write(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let mut rows = std::mem::take(&mut self.rows);
        if self.is_json {
            return rows.iter().try_for_each(|row| writeln!(out, "{}", row[0]));
        }
        if !rows.is_empty() && !std::mem::replace(&mut self.is_begun, true) {
            rows.insert(0, self.columns.iter().map(|column| column.2.clone()).collect());
        }
        for row in &rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(width_of(cell));
            }
        }
        let (gap, widths) = self.fitted();
        for row in rows {
            let cells =
                self.columns.iter().zip(&widths).zip(&row).map(|((column, width), text)| {
                    let text = cut(text, *width, column.1 == '~');
                    let padding = " ".repeat(width - width_of(&text));
                    match column.1 {
                        '>' | ':' => padding + &text,
                        _ => text + &padding,
                    }
                });
            let line = cells.collect::<Vec<_>>().join(&" ".repeat(gap));
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Returns the spaces between columns, and the widths at which the table fits.
    fn fitted(&self) -> (usize, Vec<usize>) {
        let mut widths = self.widths.clone();
        let total = |widths: &[usize], gap| widths.iter().sum::<usize>() + gap * (widths.len() - 1);
        let gap = if total(&widths, 2) > self.width { 1 } else { 2 };
        while total(&widths, gap) > self.width {
            let can_shrink = |&index: &usize| {
                ['~', '.'].contains(&self.columns[index].1) && widths[index] > NAME_MIN
            };
            let widest = (0..widths.len()).filter(can_shrink).max_by_key(|&index| widths[index]);
            let Some(widest) = widest else { break };
            widths[widest] -= 1;
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
    if width_of(text) <= width {
        return text.to_owned();
    }
    let (mut chars, mut before, mut after) = (text.chars(), Vec::new(), Vec::new());
    let mut left = width.saturating_sub(1);
    loop {
        let is_before = !in_middle || before.len() == after.len();
        let next = if is_before { chars.next() } else { chars.next_back() };
        let Some(char) = next.filter(|&char| columns_of(char) <= left) else { break };
        left -= columns_of(char);
        if is_before { &mut before } else { &mut after }.push(char);
    }
    before.iter().chain(&['…']).chain(after.iter().rev()).collect()
}

/// Returns a body as text that no terminal interprets: `\n`, `\\`, and other bytes as `\x1b`.
pub fn escaped(body: &[u8]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    let mut text = String::with_capacity(body.len());
    for chunk in body.utf8_chunks() {
        for char in chunk.valid().chars() {
            match char {
                '\n' => text += "\\n",
                '\r' => text += "\\r",
                '\t' => text += "\\t",
                '\\' => text += "\\\\",
                _ if is_unprintable(char) => text += &hex(char.to_string().as_bytes()),
                _ => text.push(char),
            }
        }
        text += &hex(chunk.invalid());
    }
    text
}

/// Returns a time for a table: `45s`, `20m`, `3h`, `2d`.
pub fn span(secs: u64) -> String {
    let (number, unit) = largest_unit(secs);
    format!("{number}{}", ["s", "m", "h", "d"][unit])
}

/// Returns a word with a capital letter.
pub fn capitalized(word: &str) -> String {
    format!("{}{}", word[..1].to_uppercase(), &word[1..])
}

/// Returns `text` as a string of JSON.
pub fn json_string(text: &str) -> String {
    format!("\"{}\"", JsonText(text))
}

/// Returns the key and the value of a body in JSON, as `--dump` prints them.
pub fn json_body(body: &[u8]) -> (String, String) {
    match str::from_utf8(body) {
        Ok(text) => ("body".into(), json_string(text)),
        Err(_) => ("body_base64".into(), format!("\"{}\"", STANDARD.encode(body))),
    }
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
        assert!(spans.into_iter().all(|(secs, text)| span(secs) == text));
    }
}
