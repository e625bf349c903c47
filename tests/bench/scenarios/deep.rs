//! Millions of jobs: filling, working at that depth, draining, and what is left of the
//! memory; a probe measures stalls of other clients.

use super::{Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool, Question};
use crate::figures::Figures;
use crate::load::{Cycle, Drain, Fill};
use crate::server::{MIB, Server};
use std::time::Duration;

pub fn all() -> Vec<Scenario> {
    vec![deep("deep-1m", 1_000_000), deep("deep-10m", 10_000_000)]
}

fn deep(name: &str, depth: usize) -> Scenario {
    let what = format!(
        "{depth} jobs of 64 bytes, random priorities: fill, put-reserve-delete on 10 connections, \
         drain, rest; stalls are of a probe beside filling and draining, and after the rest"
    );
    let prepare = move |server: &mut Server, settings: &Settings| -> Outcome<Round> {
        let pool = Pool::with_probe(server.address, 1, Question::Use, server.waits());
        let mut queue =
            Queue { pool, depth, patience: settings.patience, figures: Figures::default() };
        Ok(Box::new(move |server| {
            queue.fill(server)?;
            queue.work(server)?;
            queue.drain(server)?;
            Ok(std::mem::take(&mut queue.figures))
        }))
    };
    Scenario { rounds: 1, turns: Turns::Alone, ..Scenario::new(name, what, prepare) }
}

/// The queue on its way up and down.
struct Queue {
    pool: Pool,
    depth: usize,
    patience: Duration,
    figures: Figures,
}

impl Queue {
    fn fill(&mut self, server: &Server) -> Outcome<()> {
        let before_bytes = server.rss_bytes();
        let mut fill = Fill::with_priorities(self.depth, 64);
        let limits = Limits::within(5 * self.patience);
        let measured = server.measure(|| self.pool.run(&mut fill, limits))?;
        let grown_bytes = server.rss_bytes() - before_bytes;
        self.figures.append(self.pool.take_stalls().figures("fill_"));
        self.figures.add("fill_cpu_us_per_op", measured.cpu_us / measured.ops);
        self.figures.add("bytes_per_job", grown_bytes / self.depth as f64);
        Ok(())
    }

    fn work(&mut self, server: &Server) -> Outcome<()> {
        const CONNECTIONS: usize = 10;
        const TIME: Duration = Duration::from_secs(1);
        const WARM_UP: Duration = Duration::from_millis(200);
        let mut pool = Pool::connect(server.address, CONNECTIONS);
        let mut script = Cycle::new(CONNECTIONS, 1, 64);
        pool.run(&mut script, Limits::lasting(WARM_UP))?;
        let measured = server.measure(|| pool.run(&mut script, Limits::lasting(TIME)))?;
        self.figures.append(measured.figures());
        Ok(())
    }

    /// What a server does not get done in time stays undone; then there is nothing to tell
    /// of the memory that it gives back.
    fn drain(&mut self, server: &Server) -> Outcome<()> {
        let mut drain = Drain::deleting(self.depth);
        let limits = Limits::lasting(2 * self.patience);
        let measured = server.measure(|| self.pool.run(&mut drain, limits))?;
        let drained = (self.depth - drain.left()) as f64 / self.depth as f64;
        self.figures.append(self.pool.take_stalls().figures("drain_"));
        self.figures.add("drain_cpu_us_per_op", measured.cpu_us / measured.ops);
        self.figures.add("drained_percent", 100.0 * drained);
        self.figures.add("peak_rss_mib", server.peak_rss_bytes() / MIB);
        if drain.left() == 0 {
            self.rest(server);
        }
        Ok(())
    }

    /// Only a server that nobody asks anything has time to give memory back; whoever comes
    /// then may have to wait for that.
    fn rest(&mut self, server: &Server) {
        const REST: Duration = Duration::from_secs(3);
        const AFTERMATH: Duration = Duration::from_millis(500);
        std::thread::sleep(REST);
        let share = server.rss_bytes() / server.peak_rss_bytes();
        self.pool.watch(AFTERMATH);
        self.figures.append(self.pool.take_stalls().figures("rest_"));
        self.figures.add("rss_left_percent", 100.0 * share);
    }
}
