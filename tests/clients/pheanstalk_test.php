<?php
// Drives the server with pheanstalk, a client library for PHP, and with the examples of dist/php.
//
// Usage: pheanstalk_test.php PORT, of a new server on 127.0.0.1. Each test has tubes of its own. The
// examples for Laravel and Symfony run in Debian's packages of their queue components.
declare(strict_types=1);

use Beanstalkd\Extensions;
use Beanstalkd\LaravelConnector;
use Beanstalkd\SymfonyTransportFactory;
use Pheanstalk\Exception\JobNotFoundException;
use Pheanstalk\Job;
use Pheanstalk\Pheanstalk;
use Pheanstalk\SocketFactory;

// A warning is a failure, except what is deprecated: Debian's packages are older than its PHP.
error_reporting(E_ALL & ~E_DEPRECATED);
set_error_handler(function (int $level, string $message, string $file, int $line): bool {
    if (error_reporting() & $level) {
        throw new ErrorException($message, 0, $level, $file, $line);
    }
    return true;
});
// It ends a wait for a reply that does not come, in seconds.
ini_set('default_socket_timeout', '60');
define('PORT', (int) $argv[1]);
require '/usr/share/php/Pheanstalk/autoload.php';
require __DIR__ . '/../../dist/php/Extensions.php';

/** A connection of pheanstalk, and the extensions on the same connection. */
function connect(): array
{
    $extensions = new Extensions(new SocketFactory('127.0.0.1', PORT));
    return [Pheanstalk::createWithFactory($extensions), $extensions];
}

function same(mixed $expected, mixed $found, string $what): void
{
    if ($expected !== $found) {
        $show = fn ($value) => var_export($value, true);
        throw new Exception("$what: {$show($found)} instead of {$show($expected)}");
    }
}

function throws(string $class, callable $call, string $what): void
{
    try {
        $call();
    } catch (Throwable $error) {
        same(true, $error instanceof $class, "$what throws " . get_class($error));
        return;
    }
    throw new Exception("$what throws nothing");
}

function one_connection_has_both(): void
{
    [$pheanstalk, $extensions] = connect();
    same(true, $extensions->areSupported(), 'areSupported');
    $pheanstalk->watchOnly('mail');
    $first = (int) $pheanstalk->useTube('mail')->put("one\r\ntwo")->getId();
    $second = $extensions->put('mail', '', pri: 2000);
    same($first, (int) $pheanstalk->peekReady()->getId(), 'peek-ready');
    same([$first => "one\r\ntwo", $second => ''], $extensions->reserve(10), 'reserve-batch');
    same([], $extensions->reserve(10), 'reserve-batch without jobs');
    // Pheanstalk's connection holds the jobs.
    $job = new Job($first, '');
    $pheanstalk->touch($job);
    same(2, $extensions->touchAll(), 'touch-all');
    $pheanstalk->bury($job);
    same(2, $extensions->delete([$first, $second, $second]), 'delete-batch');
    same(null, $pheanstalk->peekBuried(), 'peek-buried');
    same(null, $extensions->bodyOf($first), 'peek of a deleted job');
}

function two_workers_share_a_tube(): void
{
    [$producer, $more] = connect();
    [$single] = connect();
    [, $batches] = connect();
    $ids = [];
    for ($n = 0; $n < 200; ++$n) {
        $ids[] = (int) $producer->useTube('shared')->put("body $n")->getId();
        $ids[] = $more->put('shared', "more $n");
    }
    $single->watchOnly('shared');
    $batches->watchOnly('shared');
    $done = [];
    while ($jobs = $batches->reserve(7)) {
        if ($job = $single->reserveWithTimeout(0)) {
            $single->delete($job);
            $done[(int) $job->getId()] = $job->getData();
        }
        same(count($jobs), $batches->delete(array_keys($jobs)), 'delete-batch');
        $done += $jobs;
    }
    same(null, $single->reserveWithTimeout(0), 'reserve at the end');
    ksort($done);
    same($ids, array_keys($done), 'ids');
    same('body 0', $done[$ids[0]], 'the first body');
    same('400', (string) $single->statsTube('shared')['cmd-delete'], 'cmd-delete');
}

function tubes_are_listed_and_flushed(): void
{
    [$pheanstalk, $extensions] = connect();
    $pheanstalk->useTube('list')->watchOnly('list');
    for ($n = 0; $n < 2500; ++$n) {
        $extensions->put('list', "body $n", pri: $n, delay: $n % 2 * 1000);
    }
    $held = $pheanstalk->reserve();
    $buried = $pheanstalk->reserve();
    $pheanstalk->bury($buried);
    $jobs = iterator_to_array($extensions->jobs('list'), false);
    same(2500, count(array_unique(array_column($jobs, 'id'))), 'list-jobs any');
    same(['delayed' => 1250, 'ready' => 1248, 'reserved' => 1, 'buried' => 1],
        array_replace(['delayed' => 0, 'ready' => 0, 'reserved' => 0], array_count_values(array_column($jobs, 'state'))), 'states');
    same(1, iterator_to_array($extensions->jobs('list', 'buried'), false)[0]['buries'], 'buries');
    $bodies = iterator_to_array($extensions->bodies('list', 'delayed'));
    same(1250, count($bodies), 'peek-batch delayed');
    same('body 1', reset($bodies), 'the first delayed body');
    same(1, $extensions->flush('list', onlyBuried: true), 'flush-buried');
    same(2499, $extensions->flush('list'), 'flush-tube');
    throws(JobNotFoundException::class, fn () => $pheanstalk->touch($held), 'touch of a flushed job');
    same([], iterator_to_array($extensions->jobs('list')), 'list-jobs after the flush');
    same(0, $extensions->flush('no-such-tube'), 'flush-tube of no tube');
}

function laravel_clears_and_lists_queues(): void
{
    require_once '/usr/share/php/Illuminate/Queue/autoload.php';
    if (!class_exists(Illuminate\Queue\Jobs\InspectedJob::class)) {
        // Laravel 13 has this class. It parses the payload in the same way.
        eval('namespace Illuminate\Queue\Jobs; final class InspectedJob {
            public function __construct(public ?string $name, public int $attempts) {}
            public static function fromPayload(string $payload, ?int $attempts = null): static {
                return new static(json_decode($payload, true)["displayName"] ?? null, $attempts);
            }
        }');
    }
    require_once __DIR__ . '/../../dist/php/LaravelQueue.php';
    $config = ['host' => '127.0.0.1', 'port' => PORT, 'queue' => 'laravel', 'retry_after' => 60];
    $queue = (new LaravelConnector)->connect($config);
    $queue->setContainer(new Illuminate\Container\Container);
    same(true, $queue instanceof Illuminate\Contracts\Queue\ClearableQueue, 'ClearableQueue');
    same(0, $queue->clear('laravel'), 'clear of no queue');
    for ($n = 0; $n < 5; ++$n) {
        $queue->push("SendMail$n", ['to' => "user$n@example.org"]);
    }
    $queue->later(1000, 'SendLater', []);
    $queue->pushRaw('{"displayName":"Other"}', 'other');
    $job = $queue->pop();
    same('SendMail0', $job->payload()['displayName'], 'pop');
    $job->release(0);
    $held = $queue->pop();
    $names = fn ($jobs) => $jobs->map(fn ($job) => "$job->name $job->attempts")->all();
    same(['SendMail1 0', 'SendMail2 0', 'SendMail3 0', 'SendMail4 0'], $names($queue->pendingJobs()), 'pendingJobs');
    same(['SendLater 0'], $names($queue->delayedJobs()), 'delayedJobs');
    same(['SendMail0 2'], $names($queue->reservedJobs()), 'reservedJobs');
    same(['Other 0'], $names($queue->pendingJobs('other')), 'pendingJobs of another queue');
    same(5, $queue->allPendingJobs()->count(), 'allPendingJobs');
    same(1, $queue->allDelayedJobs()->count(), 'allDelayedJobs');
    same(1, $queue->allReservedJobs()->count(), 'allReservedJobs');
    same(6, $queue->clear('laravel'), 'clear');
    throws(JobNotFoundException::class, fn () => $held->delete(), 'delete of a cleared job');
    same([], $queue->pendingJobs()->all(), 'pendingJobs after clear');
    same(1, $queue->clear('other'), 'clear of another queue');
}

function symfony_takes_batches_and_lists_failures(): void
{
    require_once '/usr/share/php/Symfony/Component/Messenger/autoload.php';
    require_once __DIR__ . '/../../dist/php/SymfonyTransport.php';
    $factory = new SymfonyTransportFactory;
    $dsn = "beanstalkd-server://127.0.0.1:" . PORT . '/symfony?batch=3';
    same(true, $factory->supports($dsn, []), 'supports');
    $serializer = new Symfony\Component\Messenger\Transport\Serialization\PhpSerializer;
    $transport = $factory->createTransport($dsn, [], $serializer);
    $id = fn ($envelope) => $envelope->last(Symfony\Component\Messenger\Stamp\TransportMessageIdStamp::class)->getId();
    $number = fn ($envelope) => $envelope->getMessage()->number;
    $ids = [];
    for ($n = 0; $n < 7; ++$n) {
        $ids[] = $id($transport->send(new Symfony\Component\Messenger\Envelope((object) ['number' => $n])));
    }
    $later = [new Symfony\Component\Messenger\Stamp\DelayStamp(1_000_000)];
    $transport->send(new Symfony\Component\Messenger\Envelope((object) ['number' => 7], $later));
    $numbers = fn ($envelopes) => array_map($number, [...$envelopes]);
    same([0, 1, 2, 3, 4, 5, 6], $numbers($transport->all()), 'all');
    same([0, 1], $numbers($transport->all(2)), 'all with a limit');
    same(4, $number($transport->find($ids[4])), 'find');
    $transport->reject($transport->find($ids[6]));
    same(null, $transport->find($ids[6]), 'find of a rejected message');
    $batches = [];
    while ($batch = [...$transport->get()]) {
        $batches[] = array_map($number, $batch);
        array_map([$transport, 'ack'], $batch);
    }
    same([[0, 1, 2], [3, 4, 5]], $batches, 'get');
    same([], $numbers($transport->all()), 'all at the end');
}

foreach (['one_connection_has_both', 'two_workers_share_a_tube', 'tubes_are_listed_and_flushed',
    'laravel_clears_and_lists_queues', 'symfony_takes_batches_and_lists_failures'] as $test) {
    $test();
    echo "$test: ok\n";
}
