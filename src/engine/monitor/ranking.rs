//! The tubes that the status page shows: the first 100 in a chosen order, of any number of tubes.
//!
//! It keeps at most 100 rows, and knows nothing of the formats of the page.

use super::table::Column;
use super::tube_rates::TubeRates;
use super::tube_scan::TubeStats;
use super::url;
use super::value::Value;
use crate::engine::headroom::{self, Headroom};
use crate::engine::text::TUBE_NAME_MAX;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, TryReserveError};

/// The values of a tube: a row of the table, or the list on the page of the tube.
#[derive(Debug, Default)]
pub struct TubeRow {
    pub stats: TubeStats,
    /// `None` until the tube was sampled twice.
    pub rates: Option<TubeRates>,
}

/// The columns to the right of the name. The last one is shown only with a body cache.
const COLUMNS: [Column<TubeRow>; 11] = [
    Column::new("ready", "ready", |row| Value::Count(row.stats.ready)),
    Column::new("urgent", "urgent", |row| Value::Count(row.stats.urgent)),
    Column::new("reserved", "reserved", |row| Value::Count(row.stats.reserved)),
    Column::new("delayed", "delayed", |row| Value::Count(row.stats.delayed)),
    Column::new("buried", "buried", |row| Value::Count(row.stats.buried)),
    Column::new("waiting", "waiting", |row| Value::Count(row.stats.waiting)),
    Column::new("pause_left_seconds", "paused", |row| Value::Span(row.stats.pause_left)),
    Column::new("oldest_ready_seconds", "oldest ready", |row| {
        Value::Span(row.stats.oldest_ready_age)
    }),
    Column::new("puts_per_second", "puts/s", |row| Value::Rate(row.rates.map(|rates| rates.puts))),
    Column::new("deletes_per_second", "deletes/s", |row| {
        Value::Rate(row.rates.map(|rates| rates.deletes))
    }),
    Column::new("cold", "cold", |row| Value::Count(row.stats.cold)),
];

/// Returns the columns to the right of the name.
pub fn columns(has_body_cache: bool) -> &'static [Column<TubeRow>] {
    &COLUMNS[..COLUMNS.len() - usize::from(!has_body_cache)]
}

/// The order and the filter that a query asks for.
#[derive(Debug)]
pub struct TubeQuery {
    pub order: Order,
    pub is_reversed: bool,
    /// Only tubes whose name contains this text are shown.
    pub filter: String,
}

/// An order of tubes. Equal ones are in the order of their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The most puts and deletes per second first, then the most ready and reserved jobs, then the
    /// most other jobs.
    Busiest,
    /// The first name first.
    Name,
    /// The greatest value of the column with this index first.
    Column(usize),
}

/// The first rows of all rows that were added.
#[derive(Debug, Default)]
pub struct Ranking {
    /// A heap with the last row in order on top.
    first: BinaryHeap<RankedRow>,
    /// The rows in order, after [`Ranking::sort`].
    sorted: Vec<RankedRow>,
    /// The number of all rows that were added.
    added: u64,
}

#[derive(Debug)]
struct RankedRow {
    sort_key: SortKey,
    row: TubeRow,
}

/// The key by which rows are sorted, with the name of the tube.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SortKey {
    /// The greatest rank is first.
    rank: u128,
    /// Of equal ranks, the last name is first.
    are_names_reversed: bool,
}

impl SortKey {
    /// Compares two rows by their keys and the names of their tubes.
    fn compare(self, name: &str, other: SortKey, other_name: &str) -> Ordering {
        let names = name.cmp(other_name);
        let names = if self.are_names_reversed { names.reverse() } else { names };
        other.rank.cmp(&self.rank).then(names)
    }
}

impl Ord for RankedRow {
    fn cmp(&self, other: &RankedRow) -> Ordering {
        self.sort_key.compare(&self.row.stats.name, other.sort_key, &other.row.stats.name)
    }
}

impl PartialOrd for RankedRow {
    fn partial_cmp(&self, other: &RankedRow) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for RankedRow {
    fn eq(&self, other: &RankedRow) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for RankedRow {}

/// The number of rows that are kept.
pub const ROWS_MAX: usize = 100;

impl TubeQuery {
    /// The name of the order by names in a query.
    pub const BY_NAME: &str = "name";

    /// Parses a query such as `sort=-ready&filter=mail`. A minus reverses the order. An unknown
    /// order is the default one.
    pub fn parse(query: &str) -> TubeQuery {
        let sort = url::query_value(query, "sort").unwrap_or_default();
        let (key, is_reversed) =
            sort.strip_prefix('-').map_or((sort.as_str(), false), |key| (key, true));
        let column = COLUMNS.iter().position(|column| column.key == key);
        let order = match column {
            Some(index) => Order::Column(index),
            None if key == TubeQuery::BY_NAME => Order::Name,
            None => Order::Busiest,
        };
        let mut filter = url::query_value(query, "filter").unwrap_or_default();
        // The page repeats the filter, so its length is limited. A longer one matches no name, and
        // must not match when it is cut.
        if filter.len() > TUBE_NAME_MAX {
            filter = filter.chars().take(TUBE_NAME_MAX / 4 + 1).collect();
            filter.push(NOT_IN_NAMES);
        }
        TubeQuery { order, is_reversed, filter }
    }

    /// Returns the key of the order in a query; `None` for the default order.
    pub fn key(&self) -> Option<&'static str> {
        match self.order {
            Order::Busiest => None,
            Order::Name => Some(TubeQuery::BY_NAME),
            Order::Column(index) => Some(COLUMNS[index].key),
        }
    }

    /// Replaces an order by a column that is not among these by the default order.
    pub fn limit_order(&mut self, columns: &[Column<TubeRow>]) {
        if matches!(self.order, Order::Column(index) if index >= columns.len()) {
            self.order = Order::Busiest;
        }
    }

    /// Returns whether tubes with this name are shown.
    pub fn matches(&self, name: &str) -> bool {
        name.contains(&*self.filter)
    }

    fn sort_key(&self, row: &TubeRow) -> SortKey {
        let TubeStats { ready, reserved, delayed, buried, .. } = row.stats;
        let rank = match self.order {
            Order::Busiest => {
                let rate = row
                    .rates
                    .map_or(0, |rates| rates.puts.tenths().saturating_add(rates.deletes.tenths()));
                // A server has less than 2^32 jobs.
                u128::from(rate.min(u64::from(u32::MAX))) << 64
                    | u128::from(ready + reserved) << 32
                    | u128::from(delayed + buried)
            }
            Order::Name => 0,
            Order::Column(index) => (COLUMNS[index].value)(row).rank().into(),
        };
        let rank = if self.is_reversed { !rank } else { rank };
        let are_names_reversed = self.is_reversed && self.order == Order::Name;
        SortKey { rank, are_names_reversed }
    }
}

/// A character that is in no tube name.
const NOT_IN_NAMES: char = '…';

impl Ranking {
    /// Adds a row of a tube with this name, if it is among the first.
    pub fn add(
        &mut self,
        mut row: TubeRow,
        name: &str,
        query: &TubeQuery,
    ) -> Result<(), TryReserveError> {
        self.added += 1;
        let sort_key = query.sort_key(&row);
        let is_full = self.first.len() == ROWS_MAX;
        let last = self.first.peek().filter(|_| is_full);
        if last
            .is_some_and(|last| sort_key.compare(name, last.sort_key, &last.row.stats.name).is_ge())
        {
            return Ok(());
        }
        headroom::leave(Headroom::ThreeQuarters, || {
            self.first.try_reserve_exact(ROWS_MAX - self.first.len())?;
            row.stats.name.try_reserve_exact(name.len())
        })?;
        row.stats.name.push_str(name);
        let ranked = RankedRow { sort_key, row };
        if !is_full {
            self.first.push(ranked);
        } else if let Some(mut last) = self.first.peek_mut() {
            *last = ranked;
        }
        Ok(())
    }

    /// Returns the number of all rows that were added.
    pub fn added(&self) -> u64 {
        self.added
    }

    /// Sorts the rows, after all were added. A tube whose index changed during the scan may have been
    /// added twice, and keeps one row.
    pub fn sort(&mut self) {
        let rows = &mut self.sorted;
        *rows = std::mem::take(&mut self.first).into_vec();
        rows.sort_unstable_by(|a, b| a.row.stats.name.cmp(&b.row.stats.name));
        rows.dedup_by(|a, b| a.row.stats.name == b.row.stats.name);
        rows.sort_unstable();
    }

    /// Returns the rows in order, after [`Ranking::sort`].
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &TubeRow> + '_ {
        self.sorted.iter().map(|ranked| &ranked.row)
    }
}
