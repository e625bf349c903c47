//! Resolves names of hosts, services and users.
//!
//! A dynamic binary uses the C library, which follows `/etc/nsswitch.conf`. A static one reads
//! `/etc/hosts` and `/etc/passwd`, and nothing else. A static C library would load shared libraries
//! of the machine, which may have another version and are missing in an empty root, and it would be a
//! tenth of the binary. Errors name the file that was searched.

use super::sys::user::{self, Identity};
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// The names of hosts and users are read from files, without the C library.
const FILES_ONLY: bool = cfg!(target_feature = "crt-static");

const HOSTS: &str = "/etc/hosts";
const USERS: &str = "/etc/passwd";
const SERVICES: &str = "/etc/services";

/// Returns the addresses of a host, each once, with port 0; at least one.
pub fn addresses(host: &str) -> io::Result<Vec<SocketAddr>> {
    if FILES_ONLY {
        let found = addresses_in_file(host)?;
        return Ok(found.into_iter().map(|address| SocketAddr::new(address, 0)).collect());
    }
    let mut found = Vec::new();
    for address in (host, 0).to_socket_addrs()? {
        if !found.contains(&address) {
            found.push(address);
        }
    }
    if found.is_empty() { Err(ErrorKind::NotFound.into()) } else { Ok(found) }
}

fn addresses_in_file(host: &str) -> io::Result<Vec<IpAddr>> {
    let found = read(HOSTS).map(|text| addresses_in(&text, host));
    let none = "a static binary reads /etc/hosts only, which has no such name";
    let found =
        found.and_then(|found| if found.is_empty() { Err(missing(none)) } else { Ok(found) });
    found.map_err(|error| io::Error::other(format!("{error}; give an address instead")))
}

/// Returns the TCP port of a service, from `/etc/services`, whatever the C library is.
pub fn port(service: &str) -> io::Result<u16> {
    let none = "/etc/services has no such TCP service";
    let found = read(SERVICES).and_then(|text| port_in(&text, service).ok_or(missing(none)));
    found.map_err(|error| io::Error::other(format!("{error}; give a number instead")))
}

fn missing(why: &str) -> io::Error {
    io::Error::new(ErrorKind::NotFound, why)
}

/// Returns the user that `text` names: `UID`, `UID:GID` or a name. Without a GID the group has the
/// number of the user. Only names need the user database.
pub fn user(text: &str) -> io::Result<Option<Identity>> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    match (uid.parse(), gid.parse()) {
        (Ok(uid), Ok(gid)) => Ok(Identity::new(uid, gid)),
        _ if FILES_ONLY => read(USERS).map(|users| user_in(&users, text)),
        _ => user::find_by_name(text),
    }
}

fn read(path: &str) -> io::Result<String> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
    // Comments may be in any encoding.
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).map_err(named)
}

/// Searches lines of an address and its names, as in hosts(5).
fn addresses_in(text: &str, host: &str) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for line in text.lines() {
        let (line, _) = line.split_once('#').unwrap_or((line, ""));
        let mut words = line.split_whitespace();
        let Some(Ok(address)) = words.next().map(str::parse) else { continue };
        if words.any(|name| name.eq_ignore_ascii_case(host)) && !found.contains(&address) {
            found.push(address);
        }
    }
    found
}

/// Searches lines of a name, a port with its protocol, and further names, as in services(5).
fn port_in(text: &str, service: &str) -> Option<u16> {
    text.lines().find_map(|line| {
        let (line, _) = line.split_once('#').unwrap_or((line, ""));
        let mut words = line.split_whitespace();
        let (name, port) = (words.next()?, words.next()?.strip_suffix("/tcp")?);
        let is_named = name == service || words.any(|alias| alias == service);
        port.parse().ok().filter(|_| is_named)
    })
}

/// Searches lines of name, password, user and group, separated by colons, as in passwd(5).
fn user_in(text: &str, name: &str) -> Option<Identity> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        fields.next().filter(|&own| own == name)?;
        let mut numbers = fields.skip(1).map(str::parse);
        Identity::new(numbers.next()?.ok()?, numbers.next()?.ok()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_the_addresses_of_all_its_lines() {
        let text = "127.0.0.1\tlocalhost here # there\n\
            # 192.0.2.9 here\n\
            \n\
            ::1 ip6-localhost\tlocalhost\n\
            192.0.2.1   Here.example.org here\n\
            192.0.2.1 here\n\
            fe80::1%lo0 localhost\n\
            nonsense here\n";
        let found = |host| -> Vec<String> {
            addresses_in(text, host).iter().map(ToString::to_string).collect()
        };
        assert_eq!(found("localhost"), ["127.0.0.1", "::1"]);
        assert_eq!(found("HERE"), ["127.0.0.1", "192.0.2.1"]);
        assert_eq!(found("here.example.org"), ["192.0.2.1"]);
        for unknown in ["there", "192.0.2.1", "nonsense", "local", ""] {
            assert!(found(unknown).is_empty(), "{unknown}");
        }
    }

    #[test]
    fn a_service_has_a_port_for_tcp() {
        let text = "# ssh 1/tcp\n\
            domain\t53/udp\n\
            domain\t53/tcp\t\tnameserver dns # queue\n\
            only-udp 7/udp\n\
            broken tcp/8\n\
            queue 70000/tcp\n\
            queue 11300/tcp\n";
        for (name, port) in [
            ("domain", Some(53)),
            ("dns", Some(53)),
            ("queue", Some(11300)),
            ("DOMAIN", None),
            ("only-udp", None),
            ("broken", None),
            ("ssh", None),
            ("", None),
        ] {
            assert_eq!(port_in(text, name), port, "{name}");
        }
    }

    #[test]
    fn a_user_has_the_numbers_of_its_first_valid_line() {
        let text = "root:x:0:0:root:/root:/bin/sh\n\
            mail:x:eight:8::/:\n\
            mail:x:8:12::/:\n\
            mail:x:9:9::/:\n\
            short:x:1\n\
            bare::5:6\n";
        for (name, numbers) in [
            ("root", Some((0, 0))),
            ("mail", Some((8, 12))),
            ("bare", Some((5, 6))),
            ("short", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(
                user_in(text, name),
                numbers.and_then(|(uid, gid)| Identity::new(uid, gid)),
                "{name}"
            );
        }
    }

    #[test]
    fn errors_name_the_file_and_the_remedy() {
        let error = read("/no/such/file").expect_err("it is not there");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().starts_with("/no/such/file: "), "{error}");
        // A name with a blank matches no line.
        let error = addresses_in_file("no such host").expect_err("it is nowhere");
        assert!(error.to_string().contains(HOSTS), "{error}");
        assert!(error.to_string().contains("give an address"), "{error}");
    }

    #[test]
    fn numeric_users_need_no_database() {
        let user = |text| user(text).expect("the database can be read");
        assert_eq!(user("65534"), Identity::new(65534, 65534));
        assert_eq!(user("12:34"), Identity::new(12, 34));
        assert_eq!(user("root"), Identity::new(0, 0));
        for unknown in ["no such user", "12:x", "4294967295", "0:4294967295"] {
            assert_eq!(user(unknown), None, "{unknown}");
        }
    }
}
