//! What the benchmark and the soak share as programs: flags that both have, and how many files
//! they may open.

use getopts::Matches;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Those of the scenarios that have one of the texts of `--only` in their names; all, if it was
/// not given.
pub fn chosen<S>(
    matches: &Matches,
    mut scenarios: Vec<S>,
    name: impl Fn(&S) -> &str,
) -> Result<Vec<S>, String> {
    let texts = matches.opt_strs("only");
    for text in &texts {
        if !scenarios.iter().any(|scenario| name(scenario).contains(text)) {
            return Err(format!("--only {text}: no scenario has this in its name"));
        }
    }
    scenarios.retain(|scenario| {
        texts.is_empty() || texts.iter().any(|text| name(scenario).contains(text))
    });
    Ok(scenarios)
}

/// The number behind a flag, if that was given.
pub fn number<N: std::str::FromStr>(matches: &Matches, name: &str) -> Result<Option<N>, String> {
    let text = matches.opt_str(name);
    let wrong = |text: &str| format!("--{name} {text}: not a number");
    text.map(|text| text.parse().map_err(|_| wrong(&text))).transpose()
}

/// Lets the program, and the servers that inherit this, open as many files as they may.
/// Returns how many those are.
pub fn raise_open_files() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // None means no limit.
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(_) => current.unwrap_or(u64::MAX),
    }
}
