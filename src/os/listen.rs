//! Listening sockets: TCP, Unix, and those inherited from a service manager.

use super::resolve;
use super::stream::Stream;
use super::sys::files;
use super::sys::sockets::InheritedError;
use super::sys::user::{self, Identity};
use mio::net::{TcpListener, UnixListener};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// On all addresses of the machine, IPv4 and IPv6.
    All,
    /// On this address, or on all addresses that this name has.
    Host(String),
    /// At this path.
    Unix {
        /// Where.
        path: PathBuf,
        /// The permission bits of the socket there, if they are not left to the umask.
        mode: Option<u32>,
    },
}

/// A socket on which clients connect.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is named after its family")]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Why there is no listening socket.
#[derive(Debug)]
pub enum ListenError {
    /// The name has no address, or cannot be looked up.
    Resolve(String, io::Error),
    /// The service has no TCP port, or it cannot be looked up.
    Service(String, io::Error),
    /// The socket cannot be made, or not be bound to this address.
    Bind(String, io::Error),
    /// Something that is no socket is in the way.
    NotASocket(PathBuf),
    /// Another server listens at this path.
    InUse(PathBuf),
    /// It cannot be found out whether another server listens at this path.
    Unknown(PathBuf, io::Error),
    /// An inherited descriptor is not what it should be.
    Inherited(RawFd, io::Error),
    /// The inherited descriptors do not match the environment.
    Environment(InheritedError),
}

/// Thousands of clients may connect in the same moment: a connection that finds no place
/// in the backlog tries again only a second later.
const BACKLOG: i32 = 4096;

/// Opens all sockets for `address`; `port` counts for TCP only, and 0 lets the kernel
/// choose one. A Unix socket with a mode of its own is given to `user`, if there is one.
///
/// # Errors
/// One of them cannot be opened.
pub fn open(
    address: &Address,
    port: u16,
    user: Option<Identity>,
) -> Result<Vec<Listener>, ListenError> {
    match address {
        Address::All => open_all(port).map(|listener| vec![listener]),
        Address::Host(host) => open_host(host, port),
        Address::Unix { path, mode } => open_unix(path, *mode, user).map(|listener| vec![listener]),
    }
}

/// One socket that serves IPv6 and IPv4, or IPv4 alone where the machine has no IPv6.
fn open_all(port: u16) -> Result<Listener, ListenError> {
    let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    match open_tcp(both) {
        Err(ListenError::Bind(_, error)) if is_missing_family(&error) => {
            open_tcp(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
        }
        result => result,
    }
}

fn is_missing_family(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

fn open_host(host: &str, mut port: u16) -> Result<Vec<Listener>, ListenError> {
    // Literals never ask the resolver, which needs files that a bare machine has not.
    let addresses = match host.parse() {
        Ok(address) => vec![SocketAddr::new(address, port)],
        Err(_) => resolve::addresses(host)
            .map_err(|error| ListenError::Resolve(host.to_owned(), error))?,
    };
    let (mut listeners, mut not_here) = (Vec::new(), None);
    for mut address in addresses {
        address.set_port(port);
        match open_tcp(address) {
            Ok(listener) => {
                // All addresses of a name share the port that is chosen for the first.
                port = listener.port().unwrap_or(port);
                listeners.push(listener);
            }
            // A machine without IPv6 may have a name with an IPv6 address all the same.
            Err(ListenError::Bind(address, error)) if is_missing_family(&error) => {
                not_here = Some(ListenError::Bind(address, error));
            }
            Err(error) => return Err(error),
        }
    }
    match not_here {
        Some(error) if listeners.is_empty() => Err(error),
        _ => Ok(listeners),
    }
}

fn open_tcp(address: SocketAddr) -> Result<Listener, ListenError> {
    let open = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            let is_for_both = address.ip() == Ipv6Addr::UNSPECIFIED;
            socket.set_only_v6(!is_for_both)?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(Listener::Tcp(prepare_tcp(socket)?))
    };
    open().map_err(|error| ListenError::Bind(address.to_string(), error))
}

/// Accepted sockets inherit these: replies are not held back, and clients whose machine
/// has gone are noticed at last.
fn prepare_tcp(socket: Socket) -> io::Result<TcpListener> {
    socket.set_tcp_nodelay(true)?;
    socket.set_keepalive(true)?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from_std(socket.into()))
}

fn open_unix(
    path: &Path,
    mode: Option<u32>,
    user: Option<Identity>,
) -> Result<Listener, ListenError> {
    let name = || format!("unix:{}", path.display());
    if has_stale_socket(path)? {
        std::fs::remove_file(path).map_err(|error| ListenError::Bind(name(), error))?;
    }
    let open = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        let address = SockAddr::unix(path)?;
        match mode {
            // To bind and then change the mode would leave a moment in between, and the mode of
            // the descriptor is not that of the file.
            Some(mode) => files::with_file_mode(mode, || socket.bind(&address))?,
            None => socket.bind(&address)?,
        }
        // Until it is listened on nobody can connect, whosever it is.
        if let (Some(_), Some(user)) = (mode, user) {
            give_socket(path, user)?;
        }
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(Listener::Unix(UnixListener::from_std(socket.into())))
    };
    open().map_err(|error| ListenError::Bind(name(), error))
}

/// Checks that [`open`] takes no path from a server that listens there.
///
/// # Errors
/// Another server listens there, or something other than a socket is in the way.
pub fn check_unused(address: &Address) -> Result<(), ListenError> {
    match address {
        Address::Unix { path, .. } => has_stale_socket(path).map(|_| ()),
        Address::All | Address::Host(_) => Ok(()),
    }
}

/// Returns whether there is a socket at `path` on which no server listens: the kernel refuses to
/// connect to it. A server that does not accept at present still listens, though its queue may be
/// full.
fn has_stale_socket(path: &Path) -> Result<bool, ListenError> {
    match std::fs::metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        // Whatever else is wrong with the path, binding to it fails for that reason.
        Err(_) => return Ok(false),
        Ok(_) => {}
    }
    let connect = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    match connect() {
        Ok(()) => Err(ListenError::InUse(path.to_owned())),
        Err(error) => match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => Ok(true),
            Some(libc::ENOENT) => Ok(false),
            // The queue is full, or the socket is one of another type.
            Some(libc::EAGAIN | libc::EPROTOTYPE) => Err(ListenError::InUse(path.to_owned())),
            _ => Err(ListenError::Unknown(path.to_owned(), error)),
        },
    }
}

/// Whoever may write to the directory could have put another file in the place of the socket: it
/// is looked at first, and what was looked at is what changes hands.
fn give_socket(path: &Path, to: Identity) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let socket = options.read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
    let found = socket.metadata()?;
    if !found.file_type().is_socket() || found.nlink() != 1 {
        return Err(io::Error::other("another file has taken its place"));
    }
    let given = user::give_file(&socket, to);
    given.map_err(|error| io::Error::other(format!("it cannot be given to the user: {error}")))
}

/// Takes over sockets from a service manager.
///
/// # Errors
/// One of them is not a listening stream socket, TCP or Unix.
pub fn adopt(descriptors: Vec<OwnedFd>) -> Result<Vec<Listener>, ListenError> {
    let adopt = |descriptor: OwnedFd| {
        let number = descriptor.as_raw_fd();
        adopt_one(Socket::from(descriptor)).map_err(|why| ListenError::Inherited(number, why))
    };
    descriptors.into_iter().map(adopt).collect()
}

fn adopt_one(socket: Socket) -> io::Result<Listener> {
    let address = socket.local_addr()?;
    if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
        return Err(io::Error::other("it is not a listening stream socket"));
    }
    if address.as_socket().is_some() {
        return prepare_tcp(socket).map(Listener::Tcp);
    }
    if address.domain() != Domain::UNIX {
        return Err(io::Error::other("it is neither a TCP nor a Unix socket"));
    }
    socket.set_nonblocking(true)?;
    Ok(Listener::Unix(UnixListener::from_std(socket.into())))
}

impl Listener {
    /// Takes the next client that has connected.
    ///
    /// # Errors
    /// As the system says; `WouldBlock` when there is none.
    pub fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
        }
    }

    /// Whether it is where [`open`] would listen for this address, as far as that can be told
    /// without looking up a name.
    pub fn is_at(&self, address: &Address, port: u16) -> bool {
        let own = self.to_string();
        match address {
            Address::All => own == format!("[::]:{port}") || own == format!("0.0.0.0:{port}"),
            Address::Host(host) => {
                own == format!("{host}:{port}") || own == format!("[{host}]:{port}")
            }
            Address::Unix { path, .. } => own == format!("unix:{}", path.display()),
        }
    }

    /// Another descriptor of the same socket.
    ///
    /// # Errors
    /// As the system says.
    pub fn try_clone_descriptor(&self) -> io::Result<OwnedFd> {
        match self {
            Listener::Tcp(listener) => listener.as_fd().try_clone_to_owned(),
            Listener::Unix(listener) => listener.as_fd().try_clone_to_owned(),
        }
    }

    fn port(&self) -> Option<u16> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().ok().map(|address| address.port()),
            Listener::Unix(_) => None,
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Listener::Tcp(listener) => listener.as_raw_fd(),
            Listener::Unix(listener) => listener.as_raw_fd(),
        }
    }
}

/// The address, as it would be given to a client.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listener::Tcp(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "{address}"),
                Err(error) => write!(f, "an unknown address ({error})"),
            },
            Listener::Unix(listener) => match listener.local_addr() {
                Ok(address) => match address.as_pathname() {
                    Some(path) => write!(f, "unix:{}", path.display()),
                    None => write!(f, "an unnamed Unix socket"),
                },
                Err(error) => write!(f, "an unknown Unix socket ({error})"),
            },
        }
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenError::Resolve(host, error) => {
                write!(f, "cannot find the address of {host}: {error}")
            }
            ListenError::Service(name, error) => {
                write!(f, "cannot find the port of the service {name}: {error}")
            }
            ListenError::Bind(address, error) => write!(f, "cannot listen on {address}: {error}"),
            ListenError::NotASocket(path) => {
                write!(f, "cannot listen on unix:{0}: {0} exists and is no socket", path.display())
            }
            ListenError::InUse(path) => {
                write!(f, "cannot listen on unix:{}: another server listens there", path.display())
            }
            ListenError::Unknown(path, error) => write!(
                f,
                "cannot listen on unix:{0}: a server may listen there already, but connecting to \
                 it fails: {error}; remove {0} if no server uses it",
                path.display()
            ),
            ListenError::Inherited(number, why) => {
                write!(f, "cannot listen on inherited descriptor {number}: {why}")
            }
            ListenError::Environment(InheritedError::NotOpen(number)) => {
                write!(f, "cannot listen on inherited descriptor {number}: it is not open")
            }
            ListenError::Environment(InheritedError::Count(count)) => write!(
                f,
                "cannot listen on inherited descriptors: LISTEN_FDS={}: not a number of descriptors",
                count.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::SockRef;

    #[test]
    fn replies_are_not_held_back_and_lost_clients_are_noticed() {
        let address = Address::Host("127.0.0.1".to_owned());
        let listeners = open(&address, 0, None).expect("a port is free");
        let port = listeners[0].port().expect("it is TCP");
        let _client = std::net::TcpStream::connect(("127.0.0.1", port)).expect("it listens");
        let Ok(Stream::Tcp(stream)) = listeners[0].accept() else { panic!("a client has come") };
        let socket = SockRef::from(&stream);
        assert_eq!((socket.tcp_nodelay().ok(), socket.keepalive().ok()), (Some(true), Some(true)));
    }
}
