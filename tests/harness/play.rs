//! Plays a conversation into a world.

use super::script::{self, Expectation, Inbox, Line, Script};
use super::world::{Client, Restart, World};
use std::collections::BTreeMap;

/// A failure shows this many bytes of what was sent last.
const LAST_SENT_LEN: usize = 200;

/// One script and the world that it is played into.
pub struct Play<'s, W> {
    pub world: W,
    /// The script has no binlog, but the server has one.
    hides_binlog: bool,
    /// The version of C beanstalkd, if the script is played into it.
    pub c_version: Option<&'s str>,
    last_sent: String,
}

/// A client of the script, with what it has received.
struct Named {
    client: Client,
    inbox: Inbox,
}

impl<W: World> Play<'_, W> {
    pub fn new(world: W, hides_binlog: bool) -> Self {
        Play { world, hides_binlog, c_version: None, last_sent: String::new() }
    }

    /// Plays the script and compares what comes back.
    pub fn play(&mut self, script: &Script) -> Result<(), String> {
        let mut clients: BTreeMap<String, Named> = BTreeMap::new();
        for (number, line) in &script.lines {
            let outcome = self.play_line(&mut clients, line);
            outcome.map_err(|why| {
                let path = script.path.display();
                format!("{path}:{number}: {why}\n  last sent {}", self.last_sent)
            })?;
        }
        // Output after the last expectation is an error too.
        for (name, Named { client, inbox }) in &mut clients {
            inbox.add(&self.world.take(*client, true).unwrap_or_default());
            let checked = inbox.check_empty();
            checked.map_err(|why| format!("{}, the end, {name}: {why}", script.path.display()))?;
        }
        Ok(())
    }

    fn play_line(
        &mut self,
        clients: &mut BTreeMap<String, Named>,
        line: &Line,
    ) -> Result<(), String> {
        match line {
            Line::Send { client, bytes } => {
                let client = self.client(clients, client).client;
                self.world.send(client, bytes);
                self.last_sent = script::escape(&bytes[..bytes.len().min(LAST_SENT_LEN)]);
            }
            Line::Expect { client, expectation } => {
                let client = self.client(clients, client);
                return self.expect(client, expectation);
            }
            Line::ExpectNothing { client } => {
                let Named { client, inbox } = self.client(clients, client);
                let came = self.world.take(*client, true);
                inbox.add(&came.ok_or(format!("the connection is {}", script::CLOSED))?);
                return inbox.check_empty();
            }
            Line::HalfClose { client } => {
                let client = self.client(clients, client).client;
                self.world.half_close(client);
            }
            Line::HangUp { client } => {
                self.client(clients, client);
                let gone = clients.remove(client).expect("it was just added");
                self.world.hang_up(gone.client);
            }
            Line::Drain => self.world.drain(),
            Line::Restart { is_crash } => {
                self.world.restart(if *is_crash { Restart::Kill } else { Restart::Stop });
                clients.clear();
            }
            Line::Advance { span } => self.world.advance(*span),
        }
        Ok(())
    }

    /// Returns the client with this name. It connects when a line first names it.
    fn client<'c>(
        &mut self,
        clients: &'c mut BTreeMap<String, Named>,
        name: &str,
    ) -> &'c mut Named {
        clients
            .entry(name.to_owned())
            .or_insert_with(|| Named { client: self.world.connect(), inbox: Inbox::default() })
    }

    fn expect(&mut self, from: &mut Named, expectation: &Expectation) -> Result<(), String> {
        let hides_binlog = self.hides_binlog;
        expectation.check(self.c_version, || {
            let line = self.next_line(from);
            if hides_binlog { script::without_binlog(&line) } else { line }
        })
    }

    /// Returns the next line for the client, however many pieces it comes in.
    fn next_line(&mut self, Named { client, inbox }: &mut Named) -> String {
        loop {
            if let Some(line) = inbox.next_line() {
                return line;
            }
            match self.world.take(*client, false) {
                None if inbox.is_empty() => return script::CLOSED.to_owned(),
                None => return format!("{} and then {}", inbox.rest(), script::CLOSED),
                Some(bytes) if bytes.is_empty() => return format!("{}<nothing>", inbox.rest()),
                Some(bytes) => inbox.add(&bytes),
            }
        }
    }
}
