//! C beanstalkd next to a simulation: it gets the same commands over sockets, and must give the
//! same replies. Its clock is the real one, so no reply may depend on time.

use super::driver::{Failure, Simulation};
use super::event::{Event, Setup};
use super::model::ClientNumber;
use crate::harness::client::unix;
use crate::harness::process::{Daemon, connect_when_ready};
use socket2::{SockAddr, Socket};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use tempfile::TempDir;

/// Over a Unix socket: over TCP it delays the second reply to several commands by 40 ms.
pub struct CBeanstalkd {
    _daemon: Daemon,
    address: SockAddr,
    _directory: TempDir,
    clients: BTreeMap<ClientNumber, BufReader<Socket>>,
}

/// Keys of documents that depend on the process, on time, or on C's own way of counting.
const NOT_COMPARED: [&str; 12] = [
    "age",
    "time-left",
    "pause-time-left",
    "uptime",
    "pid",
    "version",
    "rusage-utime",
    "rusage-stime",
    "id",
    "hostname",
    "os",
    "platform",
];

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
                let stream = connect_when_ready(&self.address);
                self.clients.insert(*client, BufReader::new(stream));
                // Its first reply shows that C beanstalkd has accepted the connection.
                let ask = Event::Send(*client, b"list-tube-used\r\n".to_vec());
                return self.compare(simulation, &ask);
            }
            Event::Send(client, bytes) => {
                if let Some(stream) = self.clients.get_mut(client) {
                    stream.get_mut().write_all(bytes).map_err(|error| error.to_string())?;
                }
            }
            _ => {}
        }
        while simulation.driver.is_busy() {
            simulation.apply(&Event::EndIteration)?;
        }
        for (client, sent) in simulation.take_sent() {
            let stream = self.clients.get_mut(&client).ok_or("C has no such client")?;
            let mut sent = &sent[..];
            while !sent.is_empty() {
                let ours = reply(&mut sent).map_err(|error| error.to_string())?;
                let theirs = reply(stream).map_err(|error| format!("{ours:?}, and C: {error}"))?;
                if ours != theirs {
                    return Err(format!("client {client}: {ours:?}\n  C's reply: {theirs:?}"));
                }
            }
        }
        self.compare_closed(simulation)
    }

    /// Checks that C beanstalkd has closed the connections that the simulation has closed.
    fn compare_closed(&mut self, simulation: &Simulation) -> Result<(), Failure> {
        let open = simulation.clients();
        let closed = self.clients.keys().find(|client| !open.contains(client)).copied();
        let Some(client) = closed else { return Ok(()) };
        let mut stream = self.clients.remove(&client).expect("it was just found");
        let mut rest = Vec::new();
        let end = stream.read_to_end(&mut rest);
        match end {
            Ok(0) => Ok(()),
            // It closes without having read everything.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            other => Err(format!("client {client} is closed, but C sends {rest:?}: {other:?}")),
        }
    }
}

/// Reads the next reply, without the keys that are not compared.
fn reply(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line)?;
    let line = String::from_utf8_lossy(&line).into_owned();
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let len = match words[..] {
        ["OK", len] | ["RESERVED" | "FOUND", _, len] => len.parse::<usize>().ok(),
        _ => None,
    };
    let Some(len) = len else { return Ok(line) };
    let mut body = vec![0; len + 2];
    from.read_exact(&mut body)?;
    if words[0] != "OK" {
        return Ok(format!("{line}{}", body.escape_ascii()));
    }
    let text = String::from_utf8_lossy(&body);
    let lines = text.lines().filter(|line| {
        let key = line.split(": ").next().unwrap_or_default();
        !NOT_COMPARED.contains(&key) && !key.starts_with("binlog-")
    });
    // Version 1.12 writes names without quotes.
    Ok(lines.map(|line| line.replace('"', "")).collect::<Vec<String>>().join("\n"))
}
