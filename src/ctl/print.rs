//! What the tool prints: tables, JSON, escaped bodies, times. It must not know a server.

use crate::engine::text::JsonText;
use rustix::termios::tcgetwinsize;
use std::io::{self, IsTerminal, Write};

/// The type of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// Aligned to the right, never cut.
    Number(&'static str),
    /// Aligned to the left, never cut.
    Word(&'static str),
    /// A name of up to 200 bytes, cut in its middle.
    Name(&'static str),
    /// Text, cut at its end.
    Text(&'static str),
}

/// A table that is printed in parts: its header once, and columns that get wider only.
pub struct Table {
    columns: Vec<Column>,
    widths: Vec<usize>,
    rows: Vec<Vec<String>>,
    width: usize,
    is_begun: bool,
}

/// The width where there is no terminal.
const WIDTH: usize = 80;

/// The width to which a name or a text shrinks at most, before another one shrinks.
const NAME_MIN: usize = 8;

impl Column {
    fn title(self) -> &'static str {
        match self {
            Column::Number(title)
            | Column::Word(title)
            | Column::Name(title)
            | Column::Text(title) => title,
        }
    }
}

impl Table {
    /// Returns an empty table.
    pub fn new(columns: &[Column]) -> Table {
        let widths = columns.iter().map(|column| column.title().len()).collect();
        let width = terminal_size().map_or(WIDTH, |(width, _)| width);
        Table { columns: columns.to_vec(), widths, rows: Vec::new(), width, is_begun: false }
    }

    /// Adds a row.
    pub fn add(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Prints the rows that were added since. Without rows nothing is printed, not even the header.
    pub fn print(&mut self, out: &mut dyn Write) -> io::Result<()> {
        for row in &self.rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(width_of(cell));
            }
        }
        let widths = self.fitted();
        let mut rows = std::mem::take(&mut self.rows);
        if !rows.is_empty() && !self.is_begun {
            self.is_begun = true;
            rows.insert(0, self.columns.iter().map(|column| column.title().into()).collect());
        }
        for row in rows {
            let mut line = String::new();
            for ((&column, &width), cell) in self.columns.iter().zip(&widths).zip(&row) {
                let cell = match column {
                    Column::Name(_) => cut(cell, width, width / 2),
                    Column::Text(_) => cut(cell, width, width.saturating_sub(1)),
                    Column::Number(_) | Column::Word(_) => cell.clone(),
                };
                let padding = " ".repeat(width.saturating_sub(width_of(&cell)));
                line += &match column {
                    Column::Number(_) => format!("{padding}{cell}  "),
                    Column::Word(_) | Column::Name(_) | Column::Text(_) => {
                        format!("{cell}{padding}  ")
                    }
                };
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Returns the widths at which the table fits.
    fn fitted(&self) -> Vec<usize> {
        let mut widths = self.widths.clone();
        let mut excess =
            (widths.iter().sum::<usize>() + 2 * (widths.len() - 1)).saturating_sub(self.width);
        let can_shrink = |column| matches!(column, Column::Name(_) | Column::Text(_));
        while excess > 0 {
            let flexible = (0..widths.len()).filter(|&index| can_shrink(self.columns[index]));
            match flexible.max_by_key(|&index| widths[index]) {
                Some(widest) if widths[widest] > NAME_MIN => widths[widest] -= 1,
                _ => break,
            }
            excess -= 1;
        }
        widths
    }
}

/// Returns columns and rows of the terminal that stdout is.
pub fn terminal_size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some((size.ws_col.into(), size.ws_row.into()))
}

/// Returns whether people read stdout on a terminal.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Returns the columns that a terminal needs. Wide characters take two.
fn width_of(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

fn char_width(char: char) -> usize {
    if char < '\u{1100}' || char == '…' { 1 } else { 2 }
}

/// Cuts `text` to `width` columns: `before` of them, `…`, and its end.
fn cut(text: &str, width: usize, before: usize) -> String {
    if width_of(text) <= width {
        return text.to_owned();
    }
    let within = |most: usize, chars: &mut dyn Iterator<Item = char>| {
        let mut used = 0;
        let fits = |char: &char| {
            used += char_width(*char);
            used <= most
        };
        chars.take_while(fits).collect::<Vec<char>>()
    };
    let mut line: String = within(before, &mut text.chars()).into_iter().collect();
    line.push('…');
    line.extend(within(width - before - 1, &mut text.chars().rev()).into_iter().rev());
    line
}

/// Returns a body as text that no terminal interprets: `\n`, `\\`, and other bytes as `\x1b`.
pub fn escaped(body: &[u8]) -> String {
    let mut text = String::with_capacity(body.len());
    for chunk in body.utf8_chunks() {
        for char in chunk.valid().chars() {
            match char {
                '\n' => text += "\\n",
                '\r' => text += "\\r",
                '\t' => text += "\\t",
                '\\' => text += "\\\\",
                _ if char.is_control() || is_mark(char) => {
                    let mut utf8 = [0; 4];
                    escape_bytes(char.encode_utf8(&mut utf8).as_bytes(), &mut text);
                }
                _ => text.push(char),
            }
        }
        escape_bytes(chunk.invalid(), &mut text);
    }
    text
}

/// Returns whether `char` is invisible, or changes the direction of the text after it.
fn is_mark(char: char) -> bool {
    matches!(char, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}')
}

fn escape_bytes(bytes: &[u8], text: &mut String) {
    for byte in bytes {
        *text += &format!("\\x{byte:02x}");
    }
}

/// Returns a time for a table: `45s`, `20m`, `3h`, `2d`.
pub fn span(secs: u64) -> String {
    match secs {
        0..120 => format!("{secs}s"),
        120..7200 => format!("{}m", secs / 60),
        7200..172_800 => format!("{}h", secs / 3600),
        _ => format!("{}d", secs / 86_400),
    }
}

/// Returns a number for people, such as `3,120`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns `text` as a string of JSON.
pub fn json_string(text: &str) -> String {
    format!("\"{}\"", JsonText(text))
}

/// Returns a JSON object of values that are JSON.
pub fn json_object<'a>(pairs: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let pairs: Vec<String> =
        pairs.into_iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_and_names_are_cut_in_the_middle() {
        let mut table = Table::new(&[Column::Name("TUBE"), Column::Number("READY")]);
        table.width = 80;
        let mut out = Vec::new();
        table.print(&mut out).unwrap();
        assert!(out.is_empty());
        let name = format!("a{}z", "-".repeat(198));
        table.add(vec![name, "7".into()]);
        table.add(vec!["b".into(), "12".into()]);
        table.print(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].chars().count(), 80);
        assert!(lines[1].starts_with("a---") && lines[1].ends_with("z      7"), "{}", lines[1]);
        assert_eq!(lines[1].chars().count(), 80);
        assert!(lines[1].contains('…'));
        assert_eq!(lines[2].chars().count(), 80);
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
        let numbers = [(0, "0"), (999, "999"), (3120, "3,120"), (1_234_567, "1,234,567")];
        assert!(numbers.into_iter().all(|(number, text)| grouped(number) == text));
        let spans = [(0, "0s"), (119, "119s"), (1200, "20m"), (7200, "2h"), (172_800, "2d")];
        assert!(spans.into_iter().all(|(secs, text)| span(secs) == text));
    }
}
