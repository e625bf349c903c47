//! The tubes that the status page shows: the first 100 in a chosen order, of any number of tubes.
//!
//! It knows nothing of the formats of the page.

use super::http;
use super::table::Column;
use super::tube_scan::{self, TubeStats};
use crate::engine::text::TUBE_NAME_MAX;

/// The order and the filter that a query asks for, and the first rows of all that were added. Equal tubes are in
/// the order of their names.
pub struct Ranking {
    /// The greatest value of this column is first; without it the tubes are in the order of their names.
    column: Option<Column<TubeStats>>,
    pub is_reversed: bool,
    /// Only tubes whose name contains this text are shown.
    pub filter: String,
    /// Up to twice as many rows as are kept, so that sorting them costs little for each one added.
    pub rows: Vec<TubeStats>,
    /// The number of all rows that were added.
    pub added: u64,
}

/// The number of rows that are kept.
const ROWS_MAX: usize = 100;

/// The name of the order by names in a query.
pub const BY_NAME: &str = "name";

/// A character that is in no tube name.
const NOT_IN_NAMES: &str = "…";

impl Ranking {
    /// Parses a query such as `sort=-ready&filter=mail`. A minus reverses the order. The default order, and
    /// an unknown one, is that of the names.
    pub fn of(query: &str, columns: &[Column<TubeStats>]) -> Ranking {
        let sort = http::query_value(query, "sort").unwrap_or_default();
        let key = sort.strip_prefix('-').unwrap_or(&sort);
        let column = columns.iter().find(|column| column.0 == key).copied();
        let mut filter = http::query_value(query, "filter").unwrap_or_default();
        // The page repeats the filter, so its length is limited. A longer one matches no name.
        if filter.len() > TUBE_NAME_MAX {
            NOT_IN_NAMES.clone_into(&mut filter);
        }
        let is_reversed = key.len() < sort.len();
        Ranking { column, is_reversed, filter, rows: Vec::new(), added: 0 }
    }

    /// Returns the key of the order in a query.
    pub fn key(&self) -> &'static str {
        self.column.map_or(BY_NAME, |(key, ..)| key)
    }

    /// Adds a row, if it is among the first.
    pub fn add(&mut self, row: TubeStats) {
        self.added += 1;
        self.rows.push(row);
        if self.rows.len() == 2 * ROWS_MAX {
            self.cut();
        }
    }

    /// Sorts the rows, after all were added. No tube keeps two rows.
    pub fn sort(&mut self) {
        tube_scan::dedup(&mut self.rows);
        self.cut();
    }

    /// Sorts the rows, and keeps the first.
    fn cut(&mut self) {
        let (column, is_reversed) = (self.column, self.is_reversed);
        self.rows.sort_unstable_by(|a, b| {
            let by_name = a.name.cmp(&b.name);
            let order = match column {
                Some((_, _, value)) => value(b).number().cmp(&value(a).number()),
                None => by_name,
            };
            let order = if is_reversed { order.reverse() } else { order };
            order.then(by_name)
        });
        self.rows.truncate(ROWS_MAX);
    }
}
