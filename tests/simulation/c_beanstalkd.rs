//! C beanstalkd next to a simulation: it gets the same commands over sockets, and must give the
//! same replies. Its clock is the real one, so no reply may depend on time.

use super::driver::{Failure, Simulation};
use super::event::{Event, Setup};
use super::model::ClientNumber;
use crate::harness::client::{Client, unix};
use crate::harness::process::{Daemon, connect_when_ready};
use crate::harness::reply::{Frame, frame};
use socket2::SockAddr;
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

/// Over a Unix socket: over TCP it delays the second reply to several commands by 40 ms.
pub struct CBeanstalkd {
    _daemon: Daemon,
    address: SockAddr,
    _directory: TempDir,
    clients: BTreeMap<ClientNumber, Client>,
}

/// Keys of documents that depend on the process, on time, or on C's own way of counting.
const NOT_COMPARED: &str = "age time-left pause-time-left uptime pid version rusage-utime \
    rusage-stime id hostname os platform";

impl CBeanstalkd {
    pub fn start(path: &Path, setup: Setup) -> CBeanstalkd {
        let directory = tempfile::tempdir().expect("there is space for a socket");
        let address = directory.path().join("socket");
        let (size, listen) =
            (setup.max_job_size.to_string(), format!("unix:{}", address.display()));
        let daemon = Daemon::start(path, &["-l", &listen, "-z", &size]);
        let (address, clients) = (unix(&address), BTreeMap::new());
        CBeanstalkd { _daemon: daemon, address, _directory: directory, clients }
    }

    /// Applies an event to both servers, and compares the replies.
    pub fn compare(&mut self, simulation: &mut Simulation, event: &Event) -> Result<(), Failure> {
        simulation.take_sent();
        simulation.apply(event)?;
        match event {
            Event::Connect(client) if !self.clients.contains_key(client) => {
                let socket = connect_when_ready(&self.address);
                self.clients.insert(*client, Client::over(socket));
                // Its first reply shows that C beanstalkd has accepted the connection.
                let ask = Event::Send(*client, b"list-tube-used\r\n".to_vec());
                return self.compare(simulation, &ask);
            }
            Event::Send(client, bytes) => {
                if let Some(other) = self.clients.get_mut(client) {
                    other.try_send(bytes).map_err(|error| error.to_string())?;
                }
            }
            _ => {}
        }
        while simulation.driver.is_busy() {
            simulation.apply(&Event::EndIteration)?;
        }
        for (client, sent) in simulation.take_sent() {
            let other = self.clients.get_mut(&client).ok_or("C has no such client")?;
            let mut sent = &sent[..];
            while !sent.is_empty() {
                let Frame { line, body, len } = frame(sent).ok_or("a part of a reply is sent")?;
                let line = String::from_utf8_lossy(line);
                let ours = compared(&line, body.unwrap_or_default());
                let reply = other.try_reply().map_err(|error| format!("{ours:?}, C: {error}"))?;
                let theirs = compared(&reply.line, &reply.body);
                sent = &sent[len..];
                if ours != theirs {
                    return Err(format!("client {client}: {}", difference(&ours, &theirs)));
                }
            }
        }
        self.compare_closed(simulation)?;
        match event {
            Event::Send(client, _) if simulation.model.is_waiting(*client) => {
                self.settle(simulation)
            }
            _ => Ok(()),
        }
    }

    /// Lets C beanstalkd read the command of a client that waits, and so gets no reply: another
    /// client's socket may still stand before it among those that epoll looks at, but only once.
    fn settle(&mut self, simulation: &mut Simulation) -> Result<(), Failure> {
        let asks = self.clients.keys().find(|client| !simulation.model.is_waiting(**client));
        let ask = asks.map(|client| Event::Send(*client, b"list-tube-used\r\n".to_vec()));
        ask.map_or(Ok(()), |ask| self.compare(simulation, &ask))
    }

    /// Checks that C beanstalkd has closed the connections that the simulation has closed.
    fn compare_closed(&mut self, simulation: &Simulation) -> Result<(), Failure> {
        let open = simulation.clients();
        let closed = self.clients.keys().find(|client| !open.contains(client)).copied();
        let Some(client) = closed else { return Ok(()) };
        let mut other = self.clients.remove(&client).expect("it was just found");
        match other.rest() {
            rest if rest.is_empty() => Ok(()),
            rest => Err(format!("client {client} is closed, but C sends {rest:?}")),
        }
    }
}

/// Returns a reply without the keys that are not compared.
fn compared(line: &str, body: &[u8]) -> String {
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
