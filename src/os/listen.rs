//! Listening sockets: TCP, Unix, and those inherited from a service manager. Accepting a connection gives
//! a socket that does not block.

use super::failure::{Failure, Result, remedy};
use super::resolve;
use super::sys::user::{self, Identity};
use super::sys::{files, sockets};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fs::OpenOptions;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// TCP.
    Tcp {
        /// An address, or a name for all of its addresses; `None` means all addresses of the machine, IPv4
        /// and IPv6.
        host: Option<String>,
        /// The port.
        port: Port,
    },
    /// A Unix socket.
    Unix {
        /// Its path.
        path: PathBuf,
        /// Its permission bits; `None` leaves them to the umask.
        mode: Option<u32>,
    },
}

/// A TCP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// A number; 0 lets the kernel choose.
    Number(u16),
    /// The name of a service.
    Service(String),
}

/// Thousands of clients may connect at the same time. A client that finds the backlog full retries
/// only after a second.
const BACKLOG: i32 = 4096;

/// Opens all sockets for `address`. A Unix socket with a mode belongs to `user`, if there is one.
pub fn open(address: &Address, user: Option<Identity>) -> Result<Vec<Socket>> {
    match address {
        Address::Tcp { host, port } => {
            port.number().and_then(|port| open_tcp(host.as_deref(), port))
        }
        Address::Unix { path, mode } => open_unix(path, *mode, user).map(|socket| vec![socket]),
    }
    .map_err(Failure::of_listening)
}

/// Opens sockets without taking anything from another server. Returns `None` for a Unix socket, which is
/// opened once the binlog is locked.
pub fn open_early(address: &Address) -> Result<Option<Vec<Socket>>> {
    match address {
        Address::Unix { path, .. } => {
            has_stale_socket(path).map(|_| None).map_err(Failure::of_listening)
        }
        Address::Tcp { .. } => open(address, None).map(Some),
    }
}

impl Port {
    fn number(&self) -> Result<u16, String> {
        match self {
            Port::Number(number) => Ok(*number),
            Port::Service(name) => resolve::port(name)
                .map_err(|error| format!("cannot find the port of the service {name}: {error}")),
        }
    }
}

fn open_tcp(host: Option<&str>, mut port: u16) -> Result<Vec<Socket>, String> {
    let addresses: Vec<SocketAddr> = match host.map(|host| (host, host.parse())) {
        // One socket for IPv6 and IPv4, or one for IPv4 alone if the machine has no IPv6.
        None => vec![(Ipv6Addr::UNSPECIFIED, 0).into(), (Ipv4Addr::UNSPECIFIED, 0).into()],
        // A literal address needs no resolver, whose files a minimal machine may lack.
        Some((_, Ok(address))) => vec![SocketAddr::new(address, 0)],
        Some((host, Err(_))) => resolve::addresses(host)
            .map_err(|error| format!("cannot find the address of {host:?} in -l: {error}"))?,
    };
    let (mut listeners, mut not_here) = (Vec::new(), None);
    for mut address in addresses {
        address.set_port(port);
        match open_one(address) {
            Ok(listener) if host.is_none() => return Ok(vec![listener]),
            Ok(listener) => {
                // All addresses of a name share the port that is chosen for the first.
                let chosen = listener.local_addr().ok().and_then(|chosen| chosen.as_socket());
                port = chosen.map_or(port, |chosen| chosen.port());
                listeners.push(listener);
            }
            // A machine without IPv6 may have names with an IPv6 address.
            Err((why, true)) => not_here = Some(why),
            Err((why, false)) => return Err(why),
        }
    }
    match not_here {
        Some(why) if listeners.is_empty() => Err(why),
        _ => Ok(listeners),
    }
}

/// Opens a socket. An error has whether the machine lacks the family of the address.
fn open_one(address: SocketAddr) -> Result<Socket, (String, bool)> {
    let open = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            let is_for_both = address.ip() == Ipv6Addr::UNSPECIFIED;
            socket.set_only_v6(!is_for_both)?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        prepare_tcp(&socket)?;
        Ok(socket)
    };
    open().map_err(|error: io::Error| {
        let is_missing =
            matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL));
        let remedy = match error.raw_os_error() {
            Some(libc::EACCES) => {
                "; start as root with -u, or give the server CAP_NET_BIND_SERVICE"
            }
            _ => remedy(&error),
        };
        (format!("cannot listen on {address}: {error}{remedy}"), is_missing)
    })
}

/// Sets options that accepted sockets inherit: replies are not delayed, and connections whose other
/// machine is gone end at last.
fn prepare_tcp(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_keepalive(true)?;
    socket.set_nonblocking(true)
}

fn open_unix(path: &Path, mode: Option<u32>, user: Option<Identity>) -> Result<Socket, String> {
    let failed = |error: io::Error| {
        let remedy = match error.raw_os_error() {
            // Of a socket, `has_stale_socket` has found out more.
            Some(libc::EADDRINUSE) => "; it links to nothing: remove it, or choose another path",
            None => "; choose a path of at most 107 bytes",
            _ => remedy(&error),
        };
        format!("cannot listen on unix:{}: {error}{remedy}", path.display())
    };
    if has_stale_socket(path)? {
        std::fs::remove_file(path).map_err(failed)?;
    }
    let open = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        let address = SockAddr::unix(path)?;
        match mode {
            // Changing the mode after the bind would be too late for a moment, and the mode of the
            // descriptor is not that of the file.
            Some(mode) => files::with_file_mode(mode, || socket.bind(&address))?,
            None => socket.bind(&address)?,
        }
        // Before `listen` the kernel rejects all connections.
        if let (Some(_), Some(user)) = (mode, user) {
            change_owner(path, user)?;
        }
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    open().map_err(failed)
}

/// Returns whether there is a socket at `path` on which no server listens: the kernel refuses to
/// connect to it. A server that does not accept connections still listens, though its backlog may be
/// full.
fn has_stale_socket(path: &Path) -> Result<bool, String> {
    let name = path.display();
    let refuse = |why: &str| Err(format!("cannot listen on unix:{name}: {why}"));
    // If the path has another fault, binding to it fails for that reason.
    let Ok(found) = std::fs::metadata(path) else { return Ok(false) };
    if !found.file_type().is_socket() {
        return refuse("the file exists and is no socket: remove it, or choose another path");
    }
    let connect = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    let Err(error) = connect() else { return refuse("another server listens there") };
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Ok(true),
        Some(libc::ENOENT) => Ok(false),
        // The backlog is full, or the socket is one of another type.
        Some(libc::EAGAIN | libc::EPROTOTYPE) => refuse("another server listens there"),
        _ => refuse(&format!(
            "a server may listen there already, but connecting to it fails: {error}; remove the file if no server \
             uses it"
        )),
    }
}

/// Changes the owner of the socket at `path`. Another user who may write to the directory could have
/// replaced it, so the file is opened and checked first, and the descriptor changes its owner.
fn change_owner(path: &Path, to: Identity) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let socket = options.read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
    let found = socket.metadata()?;
    if !found.file_type().is_socket() || found.nlink() != 1 {
        return Err(io::Error::other("the file was replaced"));
    }
    let changed = user::change_owner(&socket, to);
    changed.map_err(|error| io::Error::other(format!("cannot change its owner: {error}")))
}

/// Returns the sockets from a service manager. Each must be a listening stream socket, TCP or Unix. The caller
/// calls it once, before the process opens any descriptor.
pub fn inherited() -> Result<Vec<Socket>> {
    let adopt = |descriptor: OwnedFd| {
        let number = descriptor.as_raw_fd();
        adopt(Socket::from(descriptor))
            .map_err(|why| format!("cannot listen on inherited descriptor {number}: {why}"))
    };
    sockets::inherited_sockets()
        .and_then(|descriptors| descriptors.into_iter().map(adopt).collect())
        .map_err(Failure::of_listening)
}

fn adopt(socket: Socket) -> io::Result<Socket> {
    let address = socket.local_addr()?;
    if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
        return Err(io::Error::other("not a listening stream socket"));
    }
    if address.as_socket().is_some() {
        prepare_tcp(&socket)?;
    } else if address.domain() == Domain::UNIX {
        socket.set_nonblocking(true)?;
    } else {
        return Err(io::Error::other("neither a TCP nor a Unix socket"));
    }
    Ok(socket)
}

/// Accepts the next connection and returns it with the address of the client; the error is `WouldBlock` if
/// there is none.
pub fn accept(listener: &Socket) -> io::Result<(Socket, SockAddr)> {
    let (socket, client) = listener.accept4(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)?;
    if !client.is_unix() {
        // A client may have connected to an inherited socket before the server was started, and before
        // the socket had this option. If it cannot be set, replies are only later.
        let _ = socket.set_tcp_nodelay(true);
    }
    Ok((socket, client))
}

/// Returns whether a socket is one that [`open`] would open for `address`. Host names are not resolved, and
/// match no address.
pub fn is_at(listener: &Socket, address: &Address) -> bool {
    let own = name_of(listener);
    match address {
        Address::Tcp { host, port } => port.number().is_ok_and(|port| match host {
            None => own == format!("[::]:{port}") || own == format!("0.0.0.0:{port}"),
            Some(host) => own == format!("{host}:{port}") || own == format!("[{host}]:{port}"),
        }),
        Address::Unix { path, .. } => own == format!("unix:{}", path.display()),
    }
}

/// Returns the address of a listening socket, as a client would name it.
pub fn name_of(listener: &Socket) -> String {
    match listener.local_addr() {
        Ok(address) => match (address.as_socket(), address.as_pathname()) {
            (Some(address), _) => address.to_string(),
            (None, Some(path)) => format!("unix:{}", path.display()),
            (None, None) => "an unnamed Unix socket".to_owned(),
        },
        Err(error) => format!("an unknown address ({error})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_from_before_the_start_has_nodelay() {
        let inherited = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = inherited.local_addr().expect("it is bound");
        let _client = std::net::TcpStream::connect(address).expect("it listens");
        let listener = adopt(inherited.into()).expect("it listens");
        let (socket, _) = accept(&listener).expect("a client has come");
        assert_eq!(socket.tcp_nodelay().ok(), Some(true));
    }

    #[test]
    fn accepted_sockets_inherit_nodelay_and_keepalive() {
        let address = Address::Tcp { host: Some("127.0.0.1".to_owned()), port: Port::Number(0) };
        let listeners = open(&address, None).expect("a port is free");
        let _client = std::net::TcpStream::connect(name_of(&listeners[0])).expect("it listens");
        let (socket, _) = accept(&listeners[0]).expect("a client has come");
        assert_eq!((socket.tcp_nodelay().ok(), socket.keepalive().ok()), (Some(true), Some(true)));
    }
}
