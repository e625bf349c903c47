//! Tables and lists of values in the three formats of the status page: HTML, columns of text, and
//! JSON. It knows nothing of tubes and jobs.

use super::value::{JsonNumber, Readable, Value};
use std::fmt::{self, Write};

/// A column of a table, or a named value of a list.
#[derive(Debug)]
pub struct Column<R> {
    /// The name in JSON and in URLs.
    pub key: &'static str,
    /// The name for people.
    pub title: &'static str,
    /// Returns the value of a row.
    pub value: fn(&R) -> Value,
}

/// Appends formatted text.
pub fn push(text: &mut String, arguments: fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a string cannot fail");
}

/// Writes the cells of a row, except the one with its name.
pub fn write_html_cells<R>(columns: &[Column<R>], row: &R, text: &mut String) {
    for column in columns {
        let value = (column.value)(row);
        // Zeros are dim.
        match value.is_zero() {
            true => push(text, format_args!("<td><i>{}</i>", Readable(value))),
            false => push(text, format_args!("<td>{}", Readable(value))),
        }
    }
}

/// Writes values with their names.
pub fn write_html_list<R>(columns: &[Column<R>], row: &R, text: &mut String) {
    for Column { title, value, .. } in columns {
        let value = Readable(value(row));
        push(text, format_args!("<div><dt>{title}<dd>{value}</div>\n"));
    }
}

/// Writes the line of titles. The first column has `width` characters.
pub fn write_text_head<R>(columns: &[Column<R>], first: &str, width: usize, text: &mut String) {
    push(text, format_args!("{first:width$}"));
    for column in columns {
        push(text, format_args!(" {:>1$}", column.title, column.text_width()));
    }
    text.push('\n');
}

/// Writes the line of a row.
pub fn write_text_row<R>(
    columns: &[Column<R>],
    first: &str,
    width: usize,
    row: &R,
    text: &mut String,
) {
    push(text, format_args!("{first:width$}"));
    for column in columns {
        // Padding needs the whole text of the value.
        let value = Readable((column.value)(row)).to_string();
        push(text, format_args!(" {value:>0$}", column.text_width()));
    }
    text.push('\n');
}

/// Writes values with their names on one line.
pub fn write_text_list<R>(columns: &[Column<R>], row: &R, text: &mut String) {
    for (index, Column { title, value, .. }) in columns.iter().enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        push(text, format_args!("{separator}{title} {}", Readable(value(row))));
    }
    text.push('\n');
}

/// Writes the members of an object, without the braces.
pub fn write_json_members<R>(columns: &[Column<R>], row: &R, text: &mut String) {
    for (index, Column { key, value, .. }) in columns.iter().enumerate() {
        let separator = if index == 0 { "" } else { "," };
        push(text, format_args!("{separator}\"{key}\":{}", JsonNumber(value(row))));
    }
}

impl<R> Column<R> {
    /// Returns a column.
    pub const fn new(key: &'static str, title: &'static str, value: fn(&R) -> Value) -> Column<R> {
        Column { key, title, value }
    }

    /// Returns the width in characters: that of the title, and at least 8, which most values fit into.
    fn text_width(&self) -> usize {
        self.title.len().max(8)
    }
}
