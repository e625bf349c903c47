//! C beanstalkd next to a simulation: it gets the same commands over sockets, and must give the
//! same replies. Its clock is the real one, so no reply may depend on time.

use super::driver::{Failure, Simulation};
use super::event::{Event, Setup};
use super::model::ClientNumber;
use crate::harness::reply::{Frame, frame};
use crate::harness::world::{Client, Process, Program, World};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A world with C beanstalkd. It runs a command before it gets the next one.
pub struct CBeanstalkd {
    world: Process,
    /// The clients, with bytes that were not compared yet.
    clients: BTreeMap<ClientNumber, (Client, Vec<u8>)>,
}

/// Keys of documents that depend on the process, on time, or on C's own way of counting.
const NOT_COMPARED: &str = "age time-left pause-time-left uptime pid version rusage-utime \
    rusage-stime id hostname os platform";

impl CBeanstalkd {
    pub fn start(path: PathBuf, setup: Setup) -> CBeanstalkd {
        let program = Program::C { path, version: String::new() };
        let world = Process::new(&program, &["-z", &setup.max_job_size.to_string()], false);
        CBeanstalkd { world, clients: BTreeMap::new() }
    }

    /// Applies an event to both servers, and compares the replies.
    pub fn compare(&mut self, simulation: &mut Simulation, event: &Event) -> Result<(), Failure> {
        simulation.take_sent();
        simulation.apply(event)?;
        match event {
            Event::Connect(number) if !self.clients.contains_key(number) => {
                self.clients.insert(*number, (self.world.connect(), Vec::new()));
            }
            Event::Send(number, bytes) => {
                if let Some((client, _)) = self.clients.get(number) {
                    self.world.send(*client, bytes);
                }
            }
            _ => {}
        }
        simulation.apply(&Event::Advance(0))?;
        for (number, sent) in simulation.take_sent() {
            let mut sent = &sent[..];
            while !sent.is_empty() {
                let ours = frame(sent).ok_or("a part of a reply is sent")?;
                sent = &sent[ours.len..];
                let theirs = self.reply(number)?;
                let theirs = frame(&theirs).expect("it is a whole reply");
                let [ours, theirs] = [ours, theirs].map(|reply| compared(&reply));
                if ours != theirs {
                    return Err(format!("client {number}: {}", difference(&ours, &theirs)));
                }
            }
        }
        // C beanstalkd has closed the connections that the simulation has closed.
        let open = simulation.clients();
        while let Some(number) = self.clients.keys().copied().find(|it| !open.contains(it)) {
            let (client, rest) = self.clients.remove(&number).expect("it was just found");
            let more = self.world.take(client, false);
            if more.is_some() || !rest.is_empty() {
                return Err(format!("client {number} is closed, but C sends {more:?} {rest:?}"));
            }
        }
        Ok(())
    }

    /// Waits for a whole reply.
    fn reply(&mut self, number: ClientNumber) -> Result<Vec<u8>, Failure> {
        let (client, received) = self.clients.get_mut(&number).ok_or("C has no such client")?;
        loop {
            if let Some(Frame { len, .. }) = frame(received) {
                return Ok(received.drain(..len).collect());
            }
            match self.world.take(*client, false) {
                Some(bytes) if !bytes.is_empty() => received.extend(bytes),
                _ => return Err(format!("client {number}: C does not reply")),
            }
        }
    }
}

/// Returns a reply without the keys that are not compared.
fn compared(reply: &Frame<'_>) -> String {
    let (line, body) = (String::from_utf8_lossy(reply.line), reply.body.unwrap_or_default());
    if !line.starts_with("OK ") {
        return format!("{line} {}", body.escape_ascii());
    }
    let text = String::from_utf8_lossy(body);
    let lines = text.lines().filter(|line| {
        let key = line.split(": ").next().unwrap_or_default();
        !NOT_COMPARED.split(' ').any(|it| it == key) && !key.starts_with("binlog-")
    });
    // Version 1.12 writes names without quotes.
    lines.map(|line| line.replace('"', "")).collect::<Vec<String>>().join("\n")
}

/// Returns the lines that only one of two replies has.
fn difference(ours: &str, theirs: &str) -> String {
    let only = |these: &str, others: &str| -> String {
        let lines = these.lines().filter(|line| !others.lines().any(|it| it == *line));
        lines.collect::<Vec<&str>>().join("\n    ")
    };
    format!("\n  ours:\n    {}\n  C's:\n    {}", only(ours, theirs), only(theirs, ours))
}
