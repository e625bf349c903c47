//! The machine: its name, what this process uses of it, and what its first process asks of the kernel.

use super::check;
use crate::engine::protocol::stats::ProcessorTime;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

/// What uname tells.
#[derive(Clone, Debug)]
pub struct Uname {
    /// The host's name.
    pub hostname: String,
    /// The version of the operating system.
    pub version: String,
    /// The kind of machine.
    pub machine: String,
}

/// Asks the kernel who it is.
pub fn uname() -> Uname {
    let mut names = MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: the pointer is to a live `utsname`; all zeros is a valid one (empty strings).
    let names = unsafe {
        libc::uname(names.as_mut_ptr());
        names.assume_init()
    };
    let text = |field: &[libc::c_char]| {
        // SAFETY: the kernel ends each field with a zero byte within its array.
        unsafe { CStr::from_ptr(field.as_ptr()) }.to_string_lossy().into_owned()
    };
    Uname {
        hostname: text(&names.nodename),
        version: text(&names.version),
        machine: text(&names.machine),
    }
}

/// 16 hex digits that no other instance has.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn instance_id() -> io::Result<String> {
    let mut bytes = [0_u8; 8];
    // SAFETY: the pointer and the length are those of a live array.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) != Ok(bytes.len()) {
        return Err(io::Error::last_os_error());
    }
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// How much processor time this process has had.
pub fn processor_time() -> ProcessorTime {
    let usage = usage();
    let micros = |time: libc::timeval| {
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        seconds * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0)
    };
    ProcessorTime { user_us: micros(usage.ru_utime), system_us: micros(usage.ru_stime) }
}

/// What this process has used.
fn usage() -> libc::rusage {
    let mut usage = MaybeUninit::zeroed();
    // SAFETY: the pointer is to a live `rusage`; all zeros is a valid one.
    unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    }
}

/// Whether this process is the first of its machine or container.
pub fn is_first_process() -> bool {
    std::process::id() == 1
}

/// Lets the kernel reap the orphans that fall to the first process, so that they leave nothing
/// behind, and takes away what has ended before.
pub fn leave_orphans_to_the_kernel() {
    // SAFETY: to ignore a signal runs no code, and nobody asks how a process has ended.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        while libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) > 0 {}
    }
}

/// Has the kernel send SIGINT to the first process on Ctrl-Alt-Del, rather than restart the machine
/// on the spot; `false` if that is not for this process to say. Only the first process of a machine
/// may: that of a container is told that it makes no sense.
pub fn take_ctrl_alt_del() -> bool {
    // SAFETY: this command only sets a flag.
    unsafe { libc::reboot(libc::RB_DISABLE_CAD) == 0 }
}

/// How a machine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEnd {
    /// The power is switched off.
    PowerOff,
    /// It starts anew.
    Restart,
}

/// Ends the machine once the disks have what was written, and the console has what was told.
pub fn end_machine(end: MachineEnd) -> ! {
    let command = match end {
        MachineEnd::PowerOff => libc::RB_POWER_OFF,
        MachineEnd::Restart => libc::RB_AUTOBOOT,
    };
    // SAFETY: plain numbers; nothing of the process is needed any more.
    unsafe {
        libc::sync();
        libc::tcdrain(libc::STDERR_FILENO);
        libc::reboot(command);
    }
    // The first process must not end, whatever the kernel thinks of that.
    loop {
        std::thread::park();
    }
}

/// How many KiB of memory this process had at most, and how many of the machine's are free.
pub fn memory_kib() -> (u64, u64) {
    let mut machine = MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: the pointer is to a live `sysinfo`; all zeros is a valid one.
    let machine = unsafe {
        libc::sysinfo(machine.as_mut_ptr());
        machine.assume_init()
    };
    let free_bytes = machine.freeram * libc::c_ulong::from(machine.mem_unit);
    (u64::try_from(usage().ru_maxrss).unwrap_or(0), free_bytes / 1024)
}

/// Loads a module of the kernel, which may have to unpack it first. What is loaded already may be
/// asked for again.
///
/// # Errors
/// The kernel does not take it. The kind is `NotFound` when it lacks what another module has.
pub fn load_module(file: &File, is_packed: bool) -> io::Result<()> {
    const UNPACK: libc::c_int = 4;
    let flags = if is_packed { UNPACK } else { 0 };
    // SAFETY: the descriptor is open, and the parameters are an empty string.
    let loaded =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), flags) };
    check(loaded).or_else(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => Ok(()),
        _ => Err(error),
    })
}

/// Mounts a file system of kind `kind` from which no program and no device can be used.
///
/// # Errors
/// The kernel refuses.
pub fn mount(device: &str, directory: &str, kind: &str) -> io::Result<()> {
    mount_with(device, directory, kind, libc::MS_NODEV | libc::MS_NOATIME)
}

/// Mounts what the kernel knows of devices.
///
/// # Errors
/// The kernel refuses, or knows no such thing.
pub fn mount_devices(directory: &str) -> io::Result<()> {
    mount_with("devtmpfs", directory, "devtmpfs", 0)
}

fn mount_with(device: &str, directory: &str, kind: &str, flags: libc::c_ulong) -> io::Result<()> {
    let (device, directory) = (CString::new(device)?, CString::new(directory)?);
    let kind = CString::new(kind)?;
    let flags = flags | libc::MS_NOSUID | libc::MS_NOEXEC;
    // SAFETY: all pointers are to live strings, and no file system needs more data than none.
    check(unsafe {
        libc::mount(device.as_ptr(), directory.as_ptr(), kind.as_ptr(), flags, std::ptr::null())
    })
}

/// Takes a file system off again.
///
/// # Errors
/// Somebody uses it.
pub fn unmount(directory: &str) -> io::Result<()> {
    let directory = CString::new(directory)?;
    // SAFETY: the pointer is to a live string.
    check(unsafe { libc::umount2(directory.as_ptr(), 0) })
}

/// What a device for input calls itself.
///
/// # Errors
/// It is none.
pub fn input_device_name(device: &File) -> io::Result<String> {
    const LEN: usize = 64;
    /// `EVIOCGNAME(LEN)`: to read, so many bytes, of `E`, number 6.
    const GET_NAME: libc::Ioctl = (2 << 30) | ((LEN as libc::Ioctl) << 16) | (0x45 << 8) | 6;
    // The kernel may leave no zero byte.
    let mut name = [0_u8; LEN + 1];
    // SAFETY: the pointer is to a live array that is longer than the call was told.
    check(unsafe { libc::ioctl(device.as_raw_fd(), GET_NAME, name.as_mut_ptr()) })?;
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

/// Has the kernel send SIGTERM to this process when there is something to be read.
///
/// # Errors
/// The kernel refuses.
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

/// The name of the interface with this number, which count from 1.
pub fn interface_name(index: u32) -> Option<String> {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the pointer is to a live array of the size that this call wants.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) };
    let name = CStr::from_bytes_until_nul(&name).ok().filter(|_| !found.is_null())?;
    Some(name.to_string_lossy().into_owned())
}

/// Gives an interface its IPv4 address.
///
/// # Errors
/// There is no such interface, or the kernel refuses.
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

/// Lets packets through an interface.
///
/// # Errors
/// There is no such interface, or the kernel refuses.
pub fn bring_interface_up(interface: &str) -> io::Result<()> {
    let mut argument = interface_request(interface)?;
    // SAFETY: this request writes the flags of an `ifreq`, and the other one reads them.
    unsafe {
        control(libc::SIOCGIFFLAGS, &mut argument)?;
        const UP: libc::c_int = libc::IFF_UP | libc::IFF_RUNNING;
        argument.ifr_ifru.ifru_flags |= libc::c_short::try_from(UP).expect("it is a small number");
        control(libc::SIOCSIFFLAGS, &mut argument)
    }
}

/// Sends what is for no network of this machine to `gateway`.
///
/// # Errors
/// It cannot be reached, or the kernel refuses.
pub fn add_default_route(gateway: Ipv4Addr) -> io::Result<()> {
    /// As the kernel has it, which is not the same in each C library.
    #[repr(C)]
    struct Route {
        pad: libc::c_ulong,
        destination: libc::sockaddr,
        gateway: libc::sockaddr,
        netmask: libc::sockaddr,
        flags: libc::c_ushort,
        pad_of_flags: libc::c_short,
        more_pads: [libc::c_ulong; 2],
        metric: libc::c_short,
        device: *mut libc::c_char,
        mtu: libc::c_ulong,
        window: libc::c_ulong,
        round_trip: libc::c_ushort,
    }
    let mut argument = Route {
        pad: 0,
        destination: socket_address(Ipv4Addr::UNSPECIFIED),
        gateway: socket_address(gateway),
        netmask: socket_address(Ipv4Addr::UNSPECIFIED),
        flags: libc::RTF_UP | libc::RTF_GATEWAY,
        pad_of_flags: 0,
        more_pads: [0; 2],
        metric: 0,
        device: std::ptr::null_mut(),
        mtu: 0,
        window: 0,
        round_trip: 0,
    };
    // SAFETY: this request reads a route; that it has no name of a device is allowed.
    unsafe { control(libc::SIOCADDRT, &mut argument) }
}

/// Gives the machine a name.
///
/// # Errors
/// It is too long, or the kernel refuses.
pub fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: the pointer and the length are those of a live string.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })
}

fn interface_request(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: for all fields zeros are valid.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    // A zero byte must be left at the end.
    if interface.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let family = libc::sa_family_t::try_from(libc::AF_INET).expect("it is a small number");
    let mut socket_address = libc::sockaddr { sa_family: family, sa_data: [0; 14] };
    // Behind the two bytes of the port.
    for (to, from) in socket_address.sa_data[2..].iter_mut().zip(address.octets()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    socket_address
}

/// Makes a request to the network of the kernel.
///
/// # Safety
/// The request reads and writes a `T`, or the beginning of one.
unsafe fn control<T>(request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
    let request = libc::Ioctl::try_from(request).expect("requests are small numbers");
    // SAFETY: the descriptor is open, and the pointer is to what the caller has promised.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), request, std::ptr::from_mut(argument)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_have_names_of_their_own() {
        assert!(!uname().hostname.is_empty());
        let id = instance_id().unwrap();
        assert!(id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()));
        assert_ne!(id, instance_id().unwrap());
    }
}
