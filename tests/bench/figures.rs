//! Figures: numbers with names, and what becomes of those of several rounds.

/// What one round has come to. Names end with their unit.
#[derive(Debug, Default, Clone)]
pub struct Figures(Vec<(String, f64)>);

impl Figures {
    pub fn add(&mut self, name: &str, value: f64) {
        self.0.push((name.to_owned(), value));
    }

    /// The figures with these names.
    pub fn only(mut self, names: &[&str]) -> Figures {
        self.0.retain(|(name, _)| names.contains(&name.as_str()));
        self
    }

    /// The same with this before their names.
    pub fn with_prefix(mut self, prefix: &str) -> Figures {
        self.0.iter_mut().for_each(|(name, _)| name.insert_str(0, prefix));
        self
    }

    pub fn append(&mut self, mut others: Figures) {
        self.0.append(&mut others.0);
    }
}

/// The figures of one server in all rounds of a scenario.
#[derive(Debug, Default)]
pub struct Series(pub Vec<(String, Vec<f64>)>);

impl Series {
    /// Adds a round.
    pub fn add(&mut self, figures: Figures) {
        for (name, value) in figures.0 {
            match self.0.iter_mut().find(|(known, _)| *known == name) {
                Some((_, values)) => values.push(value),
                None => self.0.push((name, vec![value])),
            }
        }
    }

    /// Adds those figures of a round that the others do not have.
    pub fn add_missing(&mut self, mut figures: Figures) {
        figures.0.retain(|(name, _)| !self.0.iter().any(|(known, _)| known == name));
        self.add(figures);
    }

    pub fn median(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, values)| median(values))
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (lower, upper) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    f64::midpoint(lower, upper)
}
