//! C beanstalkd, beside a world: what happens there is done to it over sockets too, and it must say
//! the same. Time goes its own way there, so nothing must depend on it.

use super::event::{Event, Setup};
use super::model::ClientNumber;
use super::world::{World, Wrong};
use crate::support::{Daemon, PATIENCE};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;

pub struct Original {
    _daemon: Daemon,
    address: SocketAddr,
    clients: BTreeMap<ClientNumber, BufReader<TcpStream>>,
}

/// Lines of documents that tell of the process, of time, or of what C counts differently.
const ITS_OWN: [&str; 12] = [
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

impl Original {
    /// Starts C beanstalkd as a world is set up.
    pub fn start(path: &Path, setup: Setup) -> Original {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let size = setup.max_job_size.to_string();
        let daemon = Daemon::with_inherited(path, &["-z", &size], listener);
        Original { _daemon: daemon, address, clients: BTreeMap::new() }
    }

    /// Lets an event happen in both worlds, and compares what is said then.
    pub fn compare(&mut self, world: &mut World, event: &Event) -> Result<(), Wrong> {
        world.take_sent();
        world.apply(event)?;
        match event {
            Event::Connect(client) if !self.clients.contains_key(client) => {
                let stream = TcpStream::connect(self.address).map_err(|error| error.to_string())?;
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_nodelay(true).unwrap();
                self.clients.insert(*client, BufReader::new(stream));
                // It may not be there before it has been heard.
                return self.compare(world, &Event::Send(*client, b"list-tube-used\r\n".to_vec()));
            }
            Event::Send(client, bytes) => {
                let stream = self.clients.get_mut(client).map(BufReader::get_mut);
                stream
                    .map_or(Ok(()), |stream| stream.write_all(bytes))
                    .map_err(|e| e.to_string())?;
            }
            _ => {}
        }
        while world.is_busy() {
            world.apply(&Event::Turn)?;
        }
        for (client, said) in world.take_sent() {
            let stream = self.clients.get_mut(&client).ok_or("a client that is not there")?;
            let mut said = &said[..];
            while !said.is_empty() {
                let ours = reply(&mut said).map_err(|error| error.to_string())?;
                let theirs = reply(stream).map_err(|error| format!("{ours:?}, and C: {error}"))?;
                if ours != theirs {
                    return Err(format!("client {client} is told\n{ours}\nand by C\n{theirs}"));
                }
            }
        }
        self.close(world)
    }

    /// Who has been hung up on here, has been so there.
    fn close(&mut self, world: &World) -> Result<(), Wrong> {
        let present = world.clients();
        let over = self.clients.keys().find(|client| !present.contains(client)).copied();
        let Some(client) = over else { return Ok(()) };
        let mut stream = self.clients.remove(&client).expect("it was just found");
        let mut rest = Vec::new();
        let end = stream.read_to_end(&mut rest);
        match end {
            Ok(0) => Ok(()),
            // It closes without having read everything.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            other => Err(format!("client {client} is gone here, and C says {rest:?}: {other:?}")),
        }
    }
}

/// The next reply, as far as it can be compared.
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
        !ITS_OWN.contains(&key) && !key.starts_with("binlog-")
    });
    // Older versions have no quotes.
    Ok(lines.map(|line| line.replace('"', "")).collect::<Vec<String>>().join("\n"))
}
