//! Flags of the benchmark, and the limit of open files.

use getopts::Matches;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns the scenarios whose names contain one of the texts of `--only`, or all without it.
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

/// Parses the number after a flag, if the flag was given.
pub fn number<N: std::str::FromStr>(matches: &Matches, name: &str) -> Result<Option<N>, String> {
    let text = matches.opt_str(name);
    let wrong = |text: &str| format!("--{name} {text}: not a number");
    text.map(|text| text.parse().map_err(|_| wrong(&text))).transpose()
}

/// Raises the limit of open files of this process, and of servers that inherit it, as far as
/// the system allows. Returns the limit.
pub fn raise_open_files() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // None means no limit.
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(_) => current.unwrap_or(u64::MAX),
    }
}
