//! Who plays when: servers take their rounds of a scenario in turn, so that whatever else
//! the machine does falls on all of them; heavy scenarios have it to themselves.

use crate::client::TooSlow;
use crate::figures::Series;
use crate::scenarios::{Round, Scenario, Settings, Turns};
use crate::server::{Program, Server};

/// What a scenario has come to for one server.
pub struct Row {
    pub program: Program,
    /// None if the server was too slow.
    pub series: Option<Series>,
}

/// Runs a scenario with all programs that can take part in it.
pub fn play(scenario: &Scenario, programs: &[Program], settings: &Settings) -> Vec<Row> {
    let takes_part = |program: &&Program| scenario.has_limit || **program != Program::Limit;
    let programs: Vec<&Program> = programs.iter().filter(takes_part).collect();
    let rounds = settings.rounds.unwrap_or(scenario.rounds);
    match scenario.turns {
        Turns::Interleaved => play_interleaved(scenario, &programs, rounds, settings),
        Turns::Alone => {
            let one = |program: &&Program| {
                let series = play_alone(scenario, program, rounds, settings).ok();
                Row { program: (*program).clone(), series }
            };
            programs.iter().map(one).collect()
        }
    }
}

/// One server after the other, a fresh one for each round.
fn play_alone(
    scenario: &Scenario,
    program: &Program,
    rounds: usize,
    settings: &Settings,
) -> Result<Series, TooSlow> {
    let mut series = Series::default();
    for _ in 0..rounds {
        let mut server = Server::start(program, &scenario.setup);
        let mut round = (scenario.prepare)(&mut server, settings)?;
        series.add(round(&mut server)?);
    }
    Ok(series)
}

/// A server that is ready for its rounds.
struct Player {
    server: Server,
    round: Round,
    series: Series,
}

impl Player {
    fn new(scenario: &Scenario, program: &Program, settings: &Settings) -> Result<Player, TooSlow> {
        let mut server = Server::start(program, &scenario.setup);
        let mut round = (scenario.prepare)(&mut server, settings)?;
        // The first round warms up.
        round(&mut server)?;
        Ok(Player { server, round, series: Series::default() })
    }

    fn play(&mut self) -> Result<(), TooSlow> {
        let mut figures = (self.round)(&mut self.server)?;
        figures.add("rss_mib", self.server.rss_bytes() / MIB);
        self.series.add(figures);
        Ok(())
    }

    /// Counting system calls disturbs everything else, so it has a round of its own.
    fn play_traced(&mut self) -> Result<(), TooSlow> {
        self.server.is_traced = true;
        self.series.add_missing((self.round)(&mut self.server)?);
        Ok(())
    }
}

const MIB: f64 = 1024.0 * 1024.0;

fn play_interleaved(
    scenario: &Scenario,
    programs: &[&Program],
    rounds: usize,
    settings: &Settings,
) -> Vec<Row> {
    let mut players: Vec<Result<Player, TooSlow>> =
        programs.iter().map(|program| Player::new(scenario, program, settings)).collect();
    let mut all = |play: fn(&mut Player) -> Result<(), TooSlow>| {
        for place in &mut players {
            if let Ok(player) = place
                && let Err(too_slow) = play(player)
            {
                *place = Err(too_slow);
            }
        }
    };
    (0..rounds).for_each(|_| all(Player::play));
    if scenario.is_traced {
        all(Player::play_traced);
    }
    let row = |(program, player): (&&Program, Result<Player, TooSlow>)| Row {
        program: (*program).clone(),
        series: player.ok().map(|player| player.series),
    };
    programs.iter().zip(players).map(row).collect()
}
