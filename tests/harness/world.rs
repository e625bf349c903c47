//! What a scripted or a random test plays into: one trait for our binary, C beanstalkd, our binary on etcd, and
//! the core with the model, which `simulation/world.rs` has.

use super::client::unix;
use super::etcd::Etcd;
use super::process::{Daemon, ON_LOOPBACK, command, connect_when_ready};
use super::{PATIENCE, wait_until};
use rustix::process::Signal;
use socket2::{SockAddr, Socket};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Identifies a client of one world.
pub type Client = usize;

/// How a server ends before it is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    Stop,
    Kill,
}

/// A server with clients and a clock.
pub trait World {
    fn connect(&mut self) -> Client;

    fn send(&mut self, client: Client, bytes: &[u8]);

    /// Shuts down the sending side of the client.
    fn half_close(&mut self, client: Client);

    /// Closes the connection of the client, which reads nothing more.
    fn hang_up(&mut self, client: Client);

    /// Takes the bytes that have come for the client, or returns `None` once the server has closed the
    /// connection. Without bytes it waits for some, unless `is_brief`: then it returns none after a
    /// short time.
    fn take(&mut self, client: Client, is_brief: bool) -> Option<Vec<u8>>;

    /// Lets time pass.
    fn advance(&mut self, span: Duration);

    /// Ends the server and starts it again. All connections are gone.
    fn restart(&mut self, how: Restart);

    /// Puts the server into drain mode.
    fn drain(&mut self);

    /// Returns how far the clock of the world is ahead of the time that [`World::advance`] has let pass.
    fn delay(&self) -> Duration {
        Duration::ZERO
    }
}

/// A program that is played into over sockets.
#[derive(Clone)]
pub enum Program {
    Ours,
    C {
        path: PathBuf,
        version: String,
    },
    /// Our binary with support for etcd. The first server starts etcd.
    OnEtcd {
        path: PathBuf,
        etcd: Arc<OnceLock<Etcd>>,
    },
}

/// A server process, sockets and real time.
pub struct Process {
    daemon: Daemon,
    address: SockAddr,
    clients: Vec<Option<Socket>>,
    arguments: Vec<String>,
    program: Program,
    /// For its files.
    directory: TempDir,
    started_at: Instant,
    advanced: Duration,
}

impl Process {
    /// Starts the program with these flags. On etcd it always has a binlog.
    pub fn new(program: &Program, flags: &[&str], has_binlog: bool) -> Process {
        let directory = tempfile::tempdir().expect("there is space for files");
        let mut arguments: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
        if let Program::OnEtcd { etcd, .. } = program {
            let url = etcd.get_or_init(Etcd::start).new_binlog();
            // A busy machine may not renew a shorter lease in time.
            let flags = ["-b", &url, "--lease-ttl", "60"];
            arguments.extend(ON_LOOPBACK.iter().chain(&flags).map(|&flag| flag.to_owned()));
        } else if has_binlog {
            arguments.extend(["-b".to_owned(), directory.path().display().to_string()]);
        }
        let begun_at = Instant::now();
        let (daemon, address) = launch(program, &arguments, directory.path());
        // A server has been up for some time when it serves the first client. Half a second of that is no delay.
        let started_at = Instant::now().min(begun_at + Duration::from_millis(500));
        Process {
            daemon,
            address,
            clients: Vec::new(),
            arguments,
            program: program.clone(),
            directory,
            started_at,
            advanced: Duration::ZERO,
        }
    }

    fn socket(&mut self, client: Client) -> &mut Socket {
        self.clients[client].as_mut().expect("the client has not hung up")
    }

    /// Waits until the server has done what has arrived. Otherwise a server that a busy machine delays
    /// finds the commands of several clients at once, which C beanstalkd runs in any order.
    fn settle(&self) {
        wait_until("the server waits for an event", || self.daemon.is_asleep());
    }
}

fn launch(program: &Program, arguments: &[String], directory: &Path) -> (Daemon, SockAddr) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match program {
        Program::Ours => {
            let (daemon, address) = Daemon::on_loopback(&arguments);
            (daemon, address.into())
        }
        Program::C { path, .. } => {
            let socket = directory.join("socket");
            let listen = format!("unix:{}", socket.display());
            let daemon = Daemon::start(path, &[&["-l", &listen], &arguments[..]].concat());
            (daemon, unix(&socket))
        }
        Program::OnEtcd { path, .. } => {
            // A server that was killed would lead until its lease ends.
            let lease = directory.join("lease").display().to_string();
            let url = arguments.iter().skip_while(|&&argument| argument != "-b").nth(1);
            let leave = ["-b", url.expect("a binlog"), "--leave", &lease];
            // An etcd that is asked by all tests at the same time may answer too late.
            let left = || command(path, leave).status().expect("it starts").success();
            wait_until("etcd takes the lease back", left);
            let mut server = command(path, &arguments);
            server.env("RUNTIME_DIRECTORY", directory);
            // It listens when it leads.
            let (daemon, address) = Daemon::spawn(server).with_address();
            (daemon, address.into())
        }
    }
}

impl World for Process {
    fn connect(&mut self) -> Client {
        self.clients.push(Some(connect_when_ready(&self.address)));
        self.settle();
        self.clients.len() - 1
    }

    fn send(&mut self, client: Client, bytes: &[u8]) {
        // If the server has closed the connection, the next read shows it.
        let _ = self.socket(client).write_all(bytes);
        self.settle();
    }

    fn half_close(&mut self, client: Client) {
        let shut = self.socket(client).shutdown(Shutdown::Write);
        shut.expect("an open connection can be shut down");
        self.settle();
    }

    fn hang_up(&mut self, client: Client) {
        self.clients[client] = None;
        self.settle();
    }

    fn take(&mut self, client: Client, is_brief: bool) -> Option<Vec<u8>> {
        // No event shows that nothing comes: it has 30 ms to come.
        let patience = Some(if is_brief { Duration::from_millis(30) } else { PATIENCE });
        let mut buffer = vec![0; 1 << 16];
        let socket = self.socket(client);
        loop {
            let read = socket.set_read_timeout(patience).and_then(|()| socket.read(&mut buffer));
            let error = match read {
                Ok(0) => return None,
                Ok(count) => return Some(buffer[..count].to_vec()),
                Err(error) => error.kind(),
            };
            if matches!(error, ErrorKind::WouldBlock | ErrorKind::TimedOut) {
                return Some(Vec::new());
            }
            // Interrupted: the test was stopped and continued.
            if error != ErrorKind::Interrupted {
                return None;
            }
        }
    }

    fn advance(&mut self, span: Duration) {
        std::thread::sleep(span);
        self.advanced += span;
        self.settle();
    }

    fn restart(&mut self, how: Restart) {
        self.clients.iter_mut().for_each(|client| *client = None);
        self.daemon.end(if how == Restart::Stop { Signal::TERM } else { Signal::KILL });
        (self.daemon, self.address) = launch(&self.program, &self.arguments, self.directory.path());
    }

    fn drain(&mut self) {
        // Both servers look at signals before they look at clients.
        self.daemon.signal(Signal::USR1);
    }

    fn delay(&self) -> Duration {
        self.started_at.elapsed().saturating_sub(self.advanced)
    }
}
