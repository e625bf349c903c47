//! The machine: its name, the resources that this process uses, and the system calls of the first
//! process of a machine.

use super::check;
use crate::engine::protocol::stats::ProcessorTime;
use rustix::io::Errno;
use rustix::net::netdevice;
use rustix::process::WaitOptions;
use rustix::system::RebootCommand;
use socket2::{Domain, SockAddr, Socket, Type};
use std::ffi::CStr;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;

/// Returns the name of the host, the version of the operating system, and the kind of machine.
pub fn uname() -> [String; 3] {
    let names = rustix::system::uname();
    [names.nodename(), names.version(), names.machine()]
        .map(|name| name.to_string_lossy().into_owned())
}

/// Returns 16 random hex digits, which no other instance has.
pub fn instance_id() -> String {
    format!("{:016x}", RandomState::new().hash_one(0))
}

/// Returns the processor time of this process.
pub fn processor_time() -> ProcessorTime {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a live `rusage`; all zeros is a valid one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let micros = |time: libc::timeval| {
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        seconds * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0)
    };
    ProcessorTime { user_us: micros(usage.ru_utime), system_us: micros(usage.ru_stime) }
}

/// Returns whether this process is the first one of its machine or container.
pub fn is_first_process() -> bool {
    std::process::id() == 1
}

/// Makes the kernel reap the orphans that the first process inherits, and reaps those that have ended.
pub fn reap_orphans() {
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
}

/// Shuts the machine down, after the disks and the console have everything that was written.
pub fn shut_down(end: RebootCommand) -> ! {
    rustix::fs::sync();
    // The kernel panics if the first process ends, so it does not, even if the calls have failed.
    let _ = rustix::termios::tcdrain(io::stderr());
    let _ = rustix::system::reboot(end);
    loop {
        std::thread::park();
    }
}

/// Loads a kernel module; the kernel unpacks it if `is_packed`. A module that is already loaded is no
/// error.
///
/// # Errors
/// The kind is `NotFound` if the module needs another one that is not loaded.
pub fn load_module(file: &File, is_packed: bool) -> io::Result<()> {
    const UNPACK: libc::c_int = 4;
    match rustix::system::finit_module(file, c"", if is_packed { UNPACK } else { 0 }) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the name of an input device.
pub fn input_device_name(device: &File) -> io::Result<String> {
    const LEN: usize = 64;
    /// `EVIOCGNAME(LEN)`: direction read, LEN bytes, type `E`, number 6.
    const GET_NAME: libc::Ioctl = (2 << 30) | ((LEN as libc::Ioctl) << 16) | (0x45 << 8) | 6;
    // The kernel may fill all LEN bytes, without a zero byte at the end.
    let mut name = [0_u8; LEN + 1];
    // SAFETY: the pointer is to a live array that is longer than LEN.
    check(unsafe { libc::ioctl(device.as_raw_fd(), GET_NAME, name.as_mut_ptr()) })?;
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

/// Makes the kernel send SIGTERM to this process when the device is readable.
pub fn terminate_on_input(device: &File) -> io::Result<()> {
    const SET_SIGNAL: libc::c_int = 10;
    let fd = device.as_raw_fd();
    // SAFETY: the descriptor is open; the rest are plain numbers.
    unsafe {
        check(libc::fcntl(fd, SET_SIGNAL, libc::SIGTERM))?;
        check(libc::fcntl(fd, libc::F_SETOWN, libc::getpid()))?;
        check(libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC))
    }
}

/// Returns the name of the network interface with this number; the first one is 1.
pub fn interface_name(index: u32) -> Option<String> {
    netdevice::index_to_name(network_socket().ok()?, index).ok()
}

/// Sets the IPv4 address of an interface.
pub fn set_interface_address(
    interface: &str,
    address: Ipv4Addr,
    netmask: Ipv4Addr,
) -> io::Result<()> {
    for (request, address) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, netmask)] {
        let mut argument = interface_request(interface)?;
        argument.ifr_ifru.ifru_addr = socket_address(address);
        // SAFETY: both requests read an `ifreq` with an address.
        unsafe { control(request, &mut argument)? };
    }
    Ok(())
}

/// Brings an interface up.
pub fn bring_interface_up(interface: &str) -> io::Result<()> {
    let mut argument = interface_request(interface)?;
    // SAFETY: this request writes the flags of an `ifreq`, and the other one reads them.
    unsafe {
        control(libc::SIOCGIFFLAGS, &mut argument)?;
        const UP: libc::c_int = libc::IFF_UP | libc::IFF_RUNNING;
        argument.ifr_ifru.ifru_flags |= libc::c_short::try_from(UP).expect("it fits");
        control(libc::SIOCSIFFLAGS, &mut argument)
    }
}

/// Adds the default route, through `gateway`.
pub fn add_default_route(gateway: Ipv4Addr) -> io::Result<()> {
    /// The kernel's `rtentry`; C libraries declare it differently.
    #[repr(C)]
    struct Route {
        pad: libc::c_ulong,
        destination: libc::sockaddr,
        gateway: libc::sockaddr,
        netmask: libc::sockaddr,
        flags: libc::c_ushort,
        /// Pads, the metric, and what else may be zero.
        others: [libc::c_ulong; 8],
    }
    // SAFETY: zeros are valid for all fields.
    let mut argument: Route = unsafe { MaybeUninit::zeroed().assume_init() };
    argument.destination = socket_address(Ipv4Addr::UNSPECIFIED);
    argument.gateway = socket_address(gateway);
    argument.netmask = socket_address(Ipv4Addr::UNSPECIFIED);
    argument.flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: this request reads a route, which is no longer, and whose device may be a null pointer.
    unsafe { control(libc::SIOCADDRT, &mut argument) }
}

fn interface_request(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: zeros are valid for all fields.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    // The name must end with a zero byte.
    if interface.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let address = SockAddr::from(SocketAddr::from((address, 0)));
    // SAFETY: the pointer is to a live value, which is not shorter and has the same alignment or more.
    unsafe { address.as_ptr().cast::<libc::sockaddr>().read() }
}

/// Returns a socket for requests to the kernel's network stack.
fn network_socket() -> io::Result<Socket> {
    Socket::new(Domain::IPV4, Type::DGRAM, None)
}

/// Sends a request to the kernel's network stack.
///
/// # Safety
/// The request reads and writes a `T`, or the beginning of one.
unsafe fn control<T>(request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    let socket = network_socket()?;
    let request = libc::Ioctl::try_from(request).expect("it fits");
    // SAFETY: the descriptor is open, and the pointer is to what the caller has promised.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), request, std::ptr::from_mut(argument)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_instance_id_is_new() {
        assert!(!uname()[0].is_empty());
        let id = instance_id();
        assert!(id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()));
        assert_ne!(id, instance_id());
    }

    #[test]
    fn interfaces_have_numbers() {
        assert_eq!(interface_name(1).as_deref(), Some("lo"));
        assert_eq!(interface_name(u32::MAX), None);
    }
}
