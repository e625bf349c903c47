//! The process itself: clock, signals, user, limits, and what `stats` tells of them; and what the
//! first process of a machine asks of the kernel.
//!
//! All `unsafe` of the project is in this file and in the allocator, `memory.rs`: calls into libc that neither std nor the
//! other packages offer, each with the reason why it is sound. Nothing here knows what
//! the server does.
#![allow(unsafe_code, reason = "this is the room for it")]

use super::resolve;
use crate::engine::protocol::stats::ProcessorTime;
use crate::engine::time::{ClockOffset, Nanos};
use std::ffi::{CStr, CString, OsString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A clock that shows the time of day as it was at the start plus what has passed since:
/// moments compare across restarts, and setting the system's clock moves nothing.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// How far the time of day was ahead of [`monotonic`] at the start.
    ahead: Nanos,
}

impl Clock {
    /// Starts the clock.
    pub fn start() -> Clock {
        Clock { ahead: nanos(time_of_day()).since(monotonic()) }
    }

    /// The present moment; never before an earlier one.
    pub fn now(&self) -> Nanos {
        self.ahead + monotonic()
    }

    /// What [`monotonic`] shows at a moment of this clock.
    pub fn to_monotonic(self, moment: Nanos) -> Nanos {
        moment.since(self.ahead)
    }
}

/// A descriptor that becomes readable at a moment. The timeout of a poll stands still while the
/// machine is suspended; this does not.
#[derive(Debug)]
pub struct Alarm {
    timer: OwnedFd,
    /// The moment, as [`monotonic`] shows it.
    set_to: Nanos,
}

impl Alarm {
    /// An alarm that is not set.
    ///
    /// # Errors
    /// The kernel gives no timer.
    pub fn new() -> io::Result<Alarm> {
        // SAFETY: plain numbers.
        let fd = unsafe {
            libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC)
        };
        check(fd)?;
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Alarm { timer: unsafe { OwnedFd::from_raw_fd(fd) }, set_to: Nanos::NEVER })
    }

    /// Sets it to a moment of [`monotonic`], unless it goes off before that anyway: most calls
    /// need no system call.
    pub fn set(&mut self, moment: Nanos) {
        if moment >= self.set_to {
            return;
        }
        self.set_to = moment;
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut at = libc::itimerspec { it_interval: never, it_value: never };
        let (secs, nanos) = (moment.whole_secs(), moment.as_nanos() % 1_000_000_000);
        at.it_value.tv_sec = secs.try_into().unwrap_or(libc::time_t::MAX);
        at.it_value.tv_nsec = nanos.try_into().expect("it is less than a second");
        // SAFETY: the descriptor is open, and the pointer is to a live value; the old setting is
        // not asked for. If it fails, the timeout of the poll is what remains.
        unsafe {
            libc::timerfd_settime(
                self.timer.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const at,
                std::ptr::null_mut(),
            );
        }
    }

    /// It has gone off.
    pub fn went_off(&mut self) {
        self.set_to = Nanos::NEVER;
    }
}

impl AsRawFd for Alarm {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

/// What has passed since some moment before the start of the process, with the time in which the
/// machine was suspended: delays and times to run go on meanwhile, as in C. `Instant` has it too, but
/// tells it with so many checks that reading a command would take a tenth longer.
pub fn monotonic() -> Nanos {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the pointer is to a live value of the right type, for which zeros are valid.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_BOOTTIME, time.as_mut_ptr());
        time.assume_init()
    };
    const BEFORE_THE_START: &str = "the monotonic clock is never negative";
    let secs = u64::try_from(time.tv_sec).expect(BEFORE_THE_START);
    let nanos = u64::try_from(time.tv_nsec).expect(BEFORE_THE_START);
    Nanos::from_nanos(secs * 1_000_000_000 + nanos)
}

/// How far the time of day is ahead of a [`Clock`] that shows `now`, because the system's clock was
/// set.
pub fn clock_offset(now: Nanos) -> ClockOffset {
    ClockOffset::between(now, nanos(time_of_day()))
}

/// The time of day as the system has it, since 1970.
#[expect(clippy::disallowed_methods, reason = "the one place where clocks are read")]
pub fn time_of_day() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn nanos(span: Duration) -> Nanos {
    Nanos::from_nanos(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
}

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

/// How many bytes of memory this process has; none where /proc is missing.
pub fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    // SAFETY: it only asks.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages.checked_mul(u64::try_from(page_bytes).ok()?)
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

/// Raises the soft limit of open files to the hard one; says what it is now.
///
/// # Errors
/// The kernel refuses.
pub fn raise_file_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live `rlimit`.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    if limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the pointer is to a live `rlimit`.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    }
    Ok(limit.rlim_cur)
}

/// Lets this process open so many files, if the kernel allows it to anybody.
///
/// # Errors
/// Only a privileged process may, and never more than the kernel can hold.
pub fn set_file_limit(files: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    // SAFETY: the pointer is to a live `rlimit`.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
}

/// Locks the whole file against other processes that do the same, for as long as this process
/// keeps it open; `false` when another one has it. As C beanstalkd does, so that the two keep
/// out of each other's way.
///
/// # Errors
/// The file cannot be locked.
#[expect(clippy::cast_possible_truncation, reason = "libc gives small constants a large type")]
pub fn lock_file(file: &File) -> io::Result<bool> {
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the pointer is to a live `flock`.
    match check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const whole) }) {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EACCES | libc::EAGAIN) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Sets space aside for `len` bytes of a file from `offset` on, and lengthens the file so that
/// it has them; `false` when the file system has no means for that.
///
/// # Errors
/// There is no space, or the file cannot be written to.
pub fn allocate(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(offset).map_err(too_large)?;
    let len = libc::off_t::try_from(len).map_err(too_large)?;
    loop {
        // SAFETY: the descriptor is open; the rest are plain numbers.
        match check(unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, len) }) {
            Ok(()) => return Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => return Ok(false),
                _ => return Err(error),
            },
        }
    }
}

/// Lets the system begin to write that part of a file to the disk; it waits for none of it, but for
/// its turn if very much is on the way. Errors are told by the sync that follows.
pub fn begin_writing_out(file: &File, offset: u64, len: u64) {
    if let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) {
        // SAFETY: the descriptor is open; the rest are plain numbers.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE);
        }
    }
}

/// From now on a block of memory of `bytes` bytes or more goes back to the system as soon as it
/// is freed. Otherwise the allocator would keep the more of them the larger they once were.
pub fn give_large_blocks_back(bytes: usize) {
    // Other C libraries do so by themselves.
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
    #[cfg(target_env = "gnu")]
    // SAFETY: two plain numbers; the allocator changes nothing about the blocks it has given out.
    unsafe {
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes);
        // Beyond 65,536 such blocks it would keep all others.
        libc::mallopt(libc::M_MMAP_MAX, libc::c_int::MAX);
    }
}

/// Whether this process is the first of its machine or container.
pub fn is_first_process() -> bool {
    std::process::id() == 1
}

// ---- Before main ----

/// Rust's runtime wants descriptors 0 to 2 open, so that no file gets one of these numbers, and
/// ends the process without a word where one is closed and there is no `/dev/null`, as in an empty
/// root. So they are opened before it looks.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_THE_RUNTIME: extern "C" fn() = open_standard_descriptors;

extern "C" fn open_standard_descriptors() {
    for fd in 0..=2 {
        // SAFETY: asking is sound whatever the number, both paths are strings that end with a zero
        // byte, and whoever comes first gets the lowest number that is free, which is this one.
        unsafe {
            if libc::fcntl(fd, libc::F_GETFD) < 0
                && libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) < 0
            {
                // What is written there is refused, and nobody minds.
                libc::open(c"/".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY);
            }
        }
    }
}

// ---- The machine ----

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

// ---- Network interfaces ----

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

// ---- Signals ----

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// To end.
    Stop(Stop),
    /// SIGUSR1: to refuse puts from now on.
    Drain,
    /// SIGUSR2: to take them again.
    StopDraining,
    /// SIGHUP: to open files anew, as some servers do.
    Reopen,
}

/// The signals that end the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// SIGTERM.
    Terminate,
    /// SIGINT.
    Interrupt,
}

/// Signals as a descriptor that becomes readable.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Takes the signals that the server knows out of their usual course. SIGPIPE is
    /// ignored already: Rust's runtime does that before `main`. SIGINT stays ignored where it
    /// was, so that a shell's background job outlives the Ctrl-C of another.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take() -> io::Result<Signals> {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `sigemptyset` initialises the set, and only then is it read; the numbers
        // are those of real signals, ignoring one runs no code, and -1 asks for a new
        // descriptor.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            if !is_ignored(libc::SIGINT) {
                libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            }
            check(libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()))?;
            // A file that may not grow is an error of that write, not the end.
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::signalfd(-1, set.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
        };
        check(fd)?;
        // SAFETY: the descriptor was just made and nobody else knows it.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The signal that is to end the process and has arrived, if one has. It is not taken.
    pub fn pending_stop(&self) -> Option<Stop> {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the pointer is to a live value.
        if unsafe { libc::sigpending(set.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call has initialised the set, and the numbers are those of real signals.
        let is_pending = |signal| unsafe { libc::sigismember(set.as_ptr(), signal) == 1 };
        let signals = [(libc::SIGTERM, Stop::Terminate), (libc::SIGINT, Stop::Interrupt)];
        signals.into_iter().find(|&(signal, _)| is_pending(signal)).map(|(_, stop)| stop)
    }

    /// The next signal that has arrived.
    pub fn next(&self) -> Option<Signal> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the pointer and the length are those of a live value, for which all
        // bytes are valid.
        let (count, info) = unsafe {
            let count = libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size);
            (count, info.assume_init())
        };
        if usize::try_from(count) != Ok(size) {
            return None;
        }
        match libc::c_int::try_from(info.ssi_signo) {
            Ok(libc::SIGTERM) => Some(Signal::Stop(Stop::Terminate)),
            Ok(libc::SIGINT) => Some(Signal::Stop(Stop::Interrupt)),
            Ok(libc::SIGUSR1) => Some(Signal::Drain),
            Ok(libc::SIGUSR2) => Some(Signal::StopDraining),
            Ok(libc::SIGHUP) => Some(Signal::Reopen),
            _ => None,
        }
    }
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action the present one is only written to the live value, for
    // which all zeros are valid should that fail.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

// ---- Inherited sockets ----

/// Why inherited descriptors cannot be used.
#[derive(Debug)]
pub enum InheritedError {
    /// `LISTEN_FDS` is this, which is not a number of descriptors.
    Count(OsString),
    /// This one is not open.
    NotOpen(RawFd),
}

/// The descriptors that a service manager handed to this process, by the protocol of
/// `sd_listen_fds(3)`. To be called once, before the process opens any descriptor.
///
/// # Errors
/// `LISTEN_PID` is this process, but the descriptors do not match `LISTEN_FDS`.
pub fn inherited_sockets() -> Result<Vec<OwnedFd>, InheritedError> {
    const FIRST: RawFd = 3;
    let pid = std::env::var("LISTEN_PID").ok().and_then(|pid| pid.parse().ok());
    let Some(count) = std::env::var_os("LISTEN_FDS").filter(|_| pid == Some(std::process::id()))
    else {
        return Ok(Vec::new());
    };
    let number = count.to_str().and_then(|count| count.parse().ok());
    let Some(number) = number.filter(|&number: &RawFd| number >= 0) else {
        return Err(InheritedError::Count(count));
    };
    let range = FIRST..FIRST.saturating_add(number);
    // All are looked at before any is taken: an error must not close what others gave.
    if let Some(closed) = range.clone().find(|&fd| !keep_to_ourselves(fd)) {
        return Err(InheritedError::NotOpen(closed));
    }
    // SAFETY: they are open, and who set LISTEN_PID to this process gave them to it; by the
    // contract of this function nothing else in the process owns a descriptor yet.
    Ok(range.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect())
}

/// Has the descriptor closed should this process ever run another; `false` if it is not
/// open.
fn keep_to_ourselves(fd: RawFd) -> bool {
    // SAFETY: asking for the flags of a descriptor is sound whatever the number.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    // SAFETY: as above; only a flag of the descriptor is set.
    flags >= 0 && unsafe { libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC) } >= 0
}

// ---- The user ----

/// A user and a group to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    uid: libc::uid_t,
    gid: libc::gid_t,
}

/// Why a user cannot be found.
#[derive(Debug)]
pub enum UserError {
    /// The user database has no such name.
    Unknown,
    /// The user database cannot be read.
    Database(io::Error),
}

/// Who `user` is: `UID`, `UID:GID` or a name. Numbers stand for themselves, and without a
/// GID the group has the number of the user; only names need the user database.
///
/// # Errors
/// There is no such user.
pub fn find_user(user: &str) -> Result<Identity, UserError> {
    let (uid, gid) = user.split_once(':').unwrap_or((user, user));
    match (uid.parse(), gid.parse()) {
        // To the kernel the largest number means "as it is": nobody would be changed.
        (Ok(u32::MAX), _) | (_, Ok(u32::MAX)) => Err(UserError::Unknown),
        (Ok(uid), Ok(gid)) => Ok(Identity { uid, gid }),
        _ if resolve::ARE_IN_FILES_ONLY => find_user_in_file(user),
        _ => find_user_by_name(user),
    }
}

fn find_user_in_file(name: &str) -> Result<Identity, UserError> {
    match resolve::user_and_group(name).map_err(UserError::Database)? {
        None | Some((u32::MAX, _) | (_, u32::MAX)) => Err(UserError::Unknown),
        Some((uid, gid)) => Ok(Identity { uid, gid }),
    }
}

fn find_user_by_name(name: &str) -> Result<Identity, UserError> {
    const LARGEST_ENTRY: usize = 1024 * 1024;
    let name = CString::new(name).map_err(|_| UserError::Unknown)?;
    let mut entry = MaybeUninit::<libc::passwd>::zeroed();
    let mut strings = vec![0; 4096];
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: all pointers are to live values, and the length is that of the buffer.
        let error = unsafe {
            let buffer = (strings.as_mut_ptr(), strings.len());
            libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer.0, buffer.1, &raw mut found)
        };
        match error {
            libc::ERANGE if strings.len() < LARGEST_ENTRY => strings.resize(strings.len() * 4, 0),
            0 if found.is_null() => return Err(UserError::Unknown),
            // What other systems say of a missing name, or of a missing database.
            libc::ENOENT | libc::ESRCH => return Err(UserError::Unknown),
            0 => {
                // SAFETY: the call has succeeded and `found` points to `entry`.
                let entry = unsafe { entry.assume_init() };
                return Ok(Identity { uid: entry.pw_uid, gid: entry.pw_gid });
            }
            error => return Err(UserError::Database(io::Error::from_raw_os_error(error))),
        }
    }
}

/// Becomes another user for good: supplementary groups, group and user, in this order, since
/// the last step gives up the right to the first two. What privileges a process can have beside
/// its user go as well: unless that is root, whose they are, it keeps no capabilities, however it
/// came by them, and no program that it might run could have more rights than itself.
///
/// `false` when there are supplementary groups that may not be dropped: the process had the group
/// already and has no right to change it, so whoever started it wants them.
///
/// # Errors
/// The kernel refuses.
pub fn become_user(identity: Identity) -> io::Result<bool> {
    let Identity { uid, gid } = identity;
    // SAFETY: plain numbers; the list of groups has exactly one entry.
    let regrouped = check(unsafe { libc::setgroups(1, &raw const gid) });
    let has_no_others = match regrouped {
        Ok(()) => true,
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            supplementary_groups()?.iter().all(|&group| group == gid)
        }
        Err(error) => return Err(error),
    };
    // SAFETY: plain numbers.
    unsafe {
        check(libc::setresgid(gid, gid, gid))?;
        check(libc::setresuid(uid, uid, uid))?;
    }
    if uid != 0 {
        drop_capabilities()?;
    }
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    Ok(has_no_others)
}

/// Runs `something` with the user and group of `identity`, and then restores those of the process.
///
/// # Errors
/// The kernel refuses to change the user: `something` was not run, or the user was not restored.
pub fn as_user<T>(identity: Identity, something: impl FnOnce() -> T) -> io::Result<T> {
    const UNCHANGED: libc::uid_t = libc::uid_t::MAX;
    // SAFETY: both only ask, and cannot fail.
    let own = unsafe { Identity { uid: libc::geteuid(), gid: libc::getegid() } };
    let set_user = |uid| {
        // SAFETY: plain numbers. That it is done for one thread is enough, as there is only one.
        check(unsafe { libc::setresuid(UNCHANGED, uid, UNCHANGED) })
    };
    let set_group = |gid| {
        // SAFETY: as above.
        check(unsafe { libc::setresgid(UNCHANGED, gid, UNCHANGED) })
    };
    set_group(identity.gid)?;
    set_user(identity.uid)?;
    let done = something();
    // The user comes first: the right to change the group is root's.
    set_user(own.uid)?;
    set_group(own.gid)?;
    Ok(done)
}

fn supplementary_groups() -> io::Result<Vec<libc::gid_t>> {
    // SAFETY: with a length of 0 nothing is written.
    let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
    check(count)?;
    let mut groups = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the pointer is to so many live values; nobody else changes the groups meanwhile.
    check(unsafe { libc::getgroups(count, groups.as_mut_ptr()) })?;
    Ok(groups)
}

/// The kernel drops them itself when root becomes another user, but not if it was told to keep
/// them, and not when a user who is not root has them.
fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    /// Effective, permitted and inheritable ones; of the latter two the ambient ones are a part.
    type Sets = [u32; 3];
    const VERSION_3: u32 = 0x2008_0522;
    let header = Header { version: VERSION_3, pid: 0 };
    // In this version there are 64 capabilities, in two halves.
    let none: [Sets; 2] = [[0; 3]; 2];
    // SAFETY: both pointers are to live values of the form that this version has. That it is done
    // for one thread is enough, as there is only one.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) })
}

/// Gives a file to a user: its group too, unless the directory gave it another than that of this
/// process.
///
/// # Errors
/// The kernel refuses.
pub fn give_file(file: &File, to: Identity) -> io::Result<()> {
    // To the kernel this means "as it is".
    const UNCHANGED: libc::gid_t = libc::gid_t::MAX;
    // SAFETY: it only asks.
    let own_gid = unsafe { libc::getegid() };
    let gid = if file.metadata()?.gid() == own_gid { to.gid } else { UNCHANGED };
    // SAFETY: the descriptor is open, and the path is an empty string, which stands for it.
    check(unsafe {
        libc::fchownat(file.as_raw_fd(), c"".as_ptr(), to.uid, gid, libc::AT_EMPTY_PATH)
    })
}

/// Lets `make` make files that nobody may do more with than `mode` says, from their first moment
/// on, and as much as that. The mask is the process's, so no other thread may make files then:
/// there is none.
pub fn with_file_mode<T>(mode: u32, make: impl FnOnce() -> T) -> T {
    const ALL: libc::mode_t = 0o777;
    // SAFETY: it cannot fail and touches no memory.
    let before = unsafe { libc::umask(ALL & !mode) };
    let made = make();
    // SAFETY: as above.
    unsafe { libc::umask(before) };
    made
}

fn check(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numeric_users_need_no_database() {
        assert_eq!(find_user("65534").ok(), Some(Identity { uid: 65534, gid: 65534 }));
        assert_eq!(find_user("12:34").ok(), Some(Identity { uid: 12, gid: 34 }));
        assert_eq!(find_user("root").ok(), Some(Identity { uid: 0, gid: 0 }));
        assert!(matches!(find_user("no such user"), Err(UserError::Unknown)));
        assert!(matches!(find_user("12:x"), Err(UserError::Unknown)));
        assert!(matches!(find_user("4294967295"), Err(UserError::Unknown)));
        assert!(matches!(find_user("0:4294967295"), Err(UserError::Unknown)));
    }

    #[test]
    fn the_process_knows_itself() {
        assert!(!uname().hostname.is_empty());
        let id = instance_id().unwrap();
        assert!(id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()));
        assert_ne!(id, instance_id().unwrap());
        let clock = Clock::start();
        assert!(clock.now() <= clock.now());
    }
}
