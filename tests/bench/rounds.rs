//! Who plays when: servers take their rounds of a scenario in turn, so that whatever else
//! the machine does falls on all of them; heavy scenarios have it to themselves.

use crate::client::Outcome;
use crate::figures::Series;
use crate::scenarios::{Round, Scenario, Settings, Turns};
use crate::server::{MIB, Program, Server};

/// What a scenario has come to for one server.
pub struct Row {
    pub program: Program,
    /// None if the server was too slow.
    pub series: Option<Series>,
}

/// Runs a scenario with all programs that can take part in it.
pub fn play(scenario: &Scenario, programs: &[Program], settings: &Settings) -> Vec<Row> {
    let programs = players(scenario, programs);
    let rounds = settings.rounds.unwrap_or(scenario.rounds);
    match scenario.turns {
        Turns::Interleaved { is_traced } => {
            let mut players = Players::start(scenario, &programs, settings);
            (0..rounds).for_each(|_| players.play(Player::play));
            if is_traced {
                players.play(Player::play_traced);
            }
            players.rows()
        }
        Turns::Alone => {
            let one = |program: &&Program| {
                let series = play_alone(scenario, program, rounds, settings).ok();
                Row { program: (*program).clone(), series }
            };
            programs.iter().map(one).collect()
        }
    }
}

/// How many files the client has open in a scenario, or one server if that has more.
pub fn open_files(scenario: &Scenario, programs: &[Program]) -> u64 {
    /// Standard streams, epoll, accounts, pipes, the files of a binlog.
    const OTHERS: usize = 100;
    let servers = match scenario.turns {
        Turns::Interleaved { .. } => players(scenario, programs).len(),
        Turns::Alone => 1,
    };
    (scenario.open_files * servers + OTHERS) as u64
}

fn players<'a>(scenario: &Scenario, programs: &'a [Program]) -> Vec<&'a Program> {
    let takes_part = |program: &&Program| match program {
        Program::Limit => scenario.has_limit,
        Program::Real { can_tell_metrics, has_extensions, .. } => {
            (*can_tell_metrics || !scenario.setup.tells_metrics)
                && (*has_extensions || !scenario.needs_extensions)
        }
    };
    programs.iter().filter(takes_part).collect()
}

/// One server after the other, a fresh one for each round.
fn play_alone(
    scenario: &Scenario,
    program: &Program,
    rounds: usize,
    settings: &Settings,
) -> Outcome<Series> {
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
    fn start(scenario: &Scenario, program: &Program, settings: &Settings) -> Outcome<Player> {
        let mut server = Server::start(program, &scenario.setup);
        let mut round = (scenario.prepare)(&mut server, settings)?;
        // The first round warms up.
        round(&mut server)?;
        Ok(Player { server, round, series: Series::default() })
    }

    fn play(&mut self) -> Outcome<()> {
        let mut figures = (self.round)(&mut self.server)?;
        figures.add("rss_mib", self.server.rss_bytes() / MIB);
        self.series.add(figures);
        Ok(())
    }

    /// Counting system calls disturbs everything else, so it has a round of its own. A server
    /// that only a tracer makes too slow keeps what was measured without.
    fn play_traced(&mut self) -> Outcome<()> {
        self.server.is_traced = true;
        if let Ok(figures) = (self.round)(&mut self.server) {
            self.series.add_missing(figures);
        }
        Ok(())
    }
}

/// All servers, with those that were too slow.
struct Players(Vec<(Program, Outcome<Player>)>);

impl Players {
    fn start(scenario: &Scenario, programs: &[&Program], settings: &Settings) -> Players {
        let start =
            |program: &&Program| ((*program).clone(), Player::start(scenario, program, settings));
        Players(programs.iter().map(start).collect())
    }

    /// One after the other; a server that is too slow once is left out.
    fn play(&mut self, play: fn(&mut Player) -> Outcome<()>) {
        for (_, player) in &mut self.0 {
            if let Ok(playing) = player
                && let Err(too_slow) = play(playing)
            {
                *player = Err(too_slow);
            }
        }
    }

    fn rows(self) -> Vec<Row> {
        let row = |(program, player): (Program, Outcome<Player>)| Row {
            program,
            series: player.ok().map(|player| player.series),
        };
        self.0.into_iter().map(row).collect()
    }
}
